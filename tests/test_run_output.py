"""What a user sees of a search: few lines, the cause of a failure first, and what to do next."""

from __future__ import annotations

import json
import logging
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from processes import run_python
from ray import tune
from ray._private.worker import print_to_stdstream
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders, resolve_placeholders
from ray.tune.schedulers import (
    ASHAScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)
from ray.tune.search import ConcurrencyLimiter

from horovod_tune import DistributedTrainableCreator, report
from horovod_tune.analysis import ProgressCallback
from horovod_tune.errors import MetricNotReported, SerializationError, SpecError, TrainingFailed
from horovod_tune.ray_compat.patches.tune_run import metric_and_mode
from horovod_tune.run_settings import (
    ExperimentMetadata,
    SilentTrials,
    StoredEnds,
    TrialsThatStartOver,
    UnusedArguments,
    prepare,
    search_metadata,
)
from horovod_tune.search import BayesOptSearch
from horovod_tune.search.space.search_space import SearchSpace

pytestmark = pytest.mark.processes

# What lines of Tune's reporter begin with.
BY_TUNE = ("╭", "│", "├", "╰", "View detailed results", "To visualize", "Trial ", "Error file")


def train(config):
    report(loss=config["x"])


@pytest.fixture
def new_output(monkeypatch):
    """Tune's output as users have it; the tests' is off."""
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")


def search(trainable=None, **arguments):
    return prepare(trainable or DistributedTrainableCreator(train), arguments)


def settings(**arguments):
    with search(**arguments) as prepared:
        return prepared


def test_a_search_prints_little_and_ends_with_what_its_user_wants(
    ray_session, new_output, tmp_path, capsys, caplog
):
    def train(config):
        for step in range(20):
            report(loss=config["x"] + 1.0 / (1 + step), bound=float("inf"))
            if config["x"] == 2.0 and step == 1:
                raise ValueError("x is two")

    trainable = DistributedTrainableCreator(train, num_slots=2)
    results = tune.run(
        trainable,
        config={"x": tune.grid_search([3.0, 1.0, 2.0]), "constant": "c"},
        metric="loss",
        mode="min",
        name="quiet",
        storage_path=str(tmp_path),
        raise_on_failed_trial=False,
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30, "\n".join(lines)
    assert not [line for line in lines if line.startswith(BY_TUNE)], "\n".join(lines)
    assert "Trials did not complete" not in caplog.text and "NaN or Inf" not in caplog.text
    best, failed = results.best_trial.trial_id, results.trials[2]
    tail = "\n".join(lines[-12:])
    assert f"best trial   {best}, loss 1.05 at its last report" in tail
    assert "best config  {'x': 1.0, 'constant': 'c'}" in tail
    assert f"results      {tmp_path}/quiet" in tail
    assert f"horovod-tune report {tmp_path}/quiet -o report.html" in tail
    assert re.search(rf"{failed.trial_id} failed: rank \d of 2 on \S+ failed: ValueError: x is two", tail)
    assert Path(failed.storage.trial_fs_path, "error.txt").exists(), "what the last screen names"

    text = Path(failed.error_file).read_text().splitlines()
    assert (
        text[1].startswith("horovod_tune.errors.TrainingFailed: rank ") and text[-1] == "ValueError: x is two"
    )
    assert not any("site-packages/ray" in line for line in text)
    logged = [each.getMessage() for each in caplog.records if "failed:" in each.getMessage()]
    assert len(logged) == 1 and "ValueError: x is two" in logged[0]
    assert isinstance(failed.get_pickled_error(), TrainingFailed)


def fails(config):
    report(loss=1.0)
    raise ValueError("on purpose")


@pytest.mark.slow
def test_a_tuner_prints_as_little_or_nothing_and_the_next_search_of_another_kind_as_ever(
    ray_session, new_output, tmp_path, capsys
):
    trainable = DistributedTrainableCreator(fails)
    given = {"storage_path": str(tmp_path), "raise_on_failed_trial": False}
    tune.run(trainable, name="silent", config={1: 0.5, 2: 3}, verbose=0, **given)
    assert capsys.readouterr().out == ""
    tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(name="tuner", storage_path=str(tmp_path)),
    ).fit()
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith(BY_TUNE)], "\n".join(lines)
    assert any(line.startswith("see more ") for line in lines)
    tune.run(lambda config: {"loss": 1.0}, name="plain", storage_path=str(tmp_path), verbose=1)
    assert "View detailed results here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"resources_per_trial": {"cpu": 2}},
            SpecError,
            r"resources_per_trial .* num_hosts and num_slots .* use_gpu=True",
        ),
        ({"config": {("a", 1): 1}}, SpecError, "the keys of config must all be strings"),
        ({"config": {"layers": {("a", 1): 1}}}, SpecError, "the keys of parameter 'layers' must all be str"),
        ({"config": {"lr": 1, 2: 3}}, SpecError, "the keys of config must all be strings"),
        (
            {"config": {"x": 1.0, "model": {"guard": threading.Lock()}}},
            SerializationError,
            r"config\['model'\]\['guard'\]",
        ),
        ({"config": {"networks": [threading]}}, SerializationError, r"config\['networks'\]\[0\], .*module"),
    ],
)
def test_what_tune_cannot_take_is_named_with_our_arguments(ray_session, tmp_path, arguments, error, said):
    trainable = DistributedTrainableCreator(train, num_slots=2)
    with pytest.raises(error, match=said):
        tune.run(trainable, storage_path=str(tmp_path), verbose=0, **arguments)


@pytest.mark.slow
def test_a_function_that_never_reports_is_warned_of_once(ray_session, tmp_path, caplog):
    trainable = DistributedTrainableCreator(lambda config: None, num_slots=1)
    results = tune.run(trainable, num_samples=2, storage_path=str(tmp_path), verbose=0)
    assert [trial.status for trial in results.trials] == ["TERMINATED"] * 2
    warned = [each for each in caplog.records if "ended without a report" in each.getMessage()]
    assert len(warned) == 1 and warned[0].levelno == logging.WARNING


def test_that_a_function_has_returned_is_stored_also_if_the_trial_was_stored_before():
    trial = Trial("train", stub=True)
    trial.run_metadata.last_result = {"loss": 1.0, "done": False, "training_iteration": 1}
    trial.get_json_state()
    trial.last_result.update(done=True)  # as Tune does
    StoredEnds().on_trial_complete(0, [trial], trial)
    assert json.loads(trial.get_json_state()[1])["last_result"]["done"] is True


def test_other_trainables_keep_tunes_settings(new_output):
    assert settings(trainable=tune.Trainable, config={}) == {"config": {}}


class OwnPopulation(PopulationBasedTraining):
    """A user's subclass, for which Tune advises the same."""


@pytest.mark.parametrize("kind", [PopulationBasedTraining, OwnPopulation])
def test_tune_does_not_advise_what_happens_anyway(new_output, kind):
    scheduler = kind(metric="loss", mode="min", hyperparam_mutations={"x": [1, 2]})
    assert settings(scheduler=scheduler)["reuse_actors"] is True


def test_numpy_numbers_in_a_space_stay_an_ordered_range(new_output):
    space = {
        "n": tune.choice(list(2 ** np.arange(4, 8))),
        "deep": ({"bias": np.bool_(True)}, np.float32(0.5)),
    }
    prepared = inject_placeholders(settings(config=space)["config"], create_resolvers_map())
    assert prepared["n"].categories == [16, 32, 64, 128] and SearchSpace(prepared).columns[0].is_ordered
    assert prepared["deep"] == ({"bias": True}, 0.5)


def reports_by_keywords(config):
    tune.report(mean_loss=config["x"])


def reports_a_dictionary(config):
    tune.report({"mean_loss": config["x"]}, checkpoint=None)


def uses_horovod(config):
    import horovod.torch as hvd

    hvd.init()
    tune.report({"loss": hvd.rank()})


@pytest.mark.parametrize("trainable", [DistributedTrainableCreator(train, num_slots=1), reports_a_dictionary])
def test_objects_of_a_choice_are_points_whatever_the_trainable_is(trainable):
    """Tune passes placeholders for objects to the searcher; files have their texts."""
    space = {"x": tune.uniform(0, 1), "of": tune.choice([print, Path("/data")])}
    points = [{"x": 0.25, "of": print}, {"x": 0.5, "of": "/data"}]
    search_alg = BayesOptSearch(metric="loss", mode="min", points_to_evaluate=points)
    with search(trainable, config=space, search_alg=search_alg):
        resolvers = create_resolvers_map()
        search_alg.set_search_properties("loss", "min", inject_placeholders(space, resolvers))
    suggested = [search_alg.suggest(trial) for trial in "ab"]
    for config in suggested:
        resolve_placeholders(config, resolvers)
    assert suggested == [{"x": 0.25, "of": print}, {"x": 0.5, "of": Path("/data")}]


@pytest.mark.parametrize("chosen", [{"verbose": 2}, {"verbose": 0}, {"progress_reporter": object()}])
def test_output_that_the_user_chose_stays(new_output, chosen):
    prepared = settings(**chosen)
    assert prepared.items() >= chosen.items()
    kinds = [SilentTrials, StoredEnds, UnusedArguments, TrialsThatStartOver, ExperimentMetadata]
    assert [type(each) for each in prepared["callbacks"]] == kinds


def test_a_search_without_a_metric_says_so_when_it_starts(new_output, capsys):
    space = {"x": tune.choice([1, 2])}
    several = [
        {"config": space},
        {"num_samples": 2},
        {"search_alg": ConcurrencyLimiter(BayesOptSearch(space), 2)},
    ]
    for arguments in several:
        settings(**arguments)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("no metric: to find the best trial, write tune.run(..., metric="), (
            arguments
        )
    two = BayesOptSearch(space, metric=["a", "b"], mode=["min", "max"])
    for arguments in (
        {"config": {"epochs": 3}},  # one trial
        {"config": space, "metric": "x", "mode": "min"},
        {"num_samples": 2, "scheduler": ASHAScheduler(metric="x", mode="min")},
        {"num_samples": 2, "search_alg": ConcurrencyLimiter(two, 2)},
    ):
        settings(**arguments)
        assert "no metric" not in capsys.readouterr().out, arguments


def test_a_function_that_needs_the_creator_and_is_passed_without_it_gets_a_hint(caplog):
    def hints(function):
        caplog.clear()
        with search(function):
            return [record.getMessage() for record in caplog.records]

    cure = "pass horovod_tune.DistributedTrainableCreator({0}, num_slots=2) to Tune instead of {0}"
    (hint,) = hints(reports_by_keywords)
    assert (
        hint.startswith("reports_by_keywords reports by keywords")
        and cure.format("reports_by_keywords") in hint
    )
    (hint,) = hints(partial(uses_horovod))
    assert hint.startswith("uses_horovod uses Horovod") and cure.format("uses_horovod") in hint
    for harmless in (reports_a_dictionary, train, lambda config: {"loss": 1.0}, "no such name", print):
        assert not hints(harmless), harmless


def test_the_hint_needs_no_import_but_that_of_our_searcher():
    program = "import horovod_tune.search; from ray import tune; print(tune.run.__code__.co_name)"
    assert run_python("-c", program).stdout.split()[-1] == "_call"


def test_a_trial_that_starts_over_because_it_was_paused_without_a_checkpoint_is_warned_of_once(caplog):
    def tune_trial(name, **more):
        about = {"trial_id": name, "checkpoint": None, "num_failures": 0, "last_result": {}}
        return SimpleNamespace(**about | more)

    warning = TrialsThatStartOver(MedianStoppingRule())
    saved = tune_trial("saved", checkpoint="/c")
    trials = [
        saved,
        tune_trial("failed", num_failures=1),
        tune_trial("a"),
        tune_trial("b"),
        tune_trial("new"),
    ]
    for trial in trials:
        warning.on_trial_start(0, trials, trial)
    for trial in trials[:-1]:
        trial.last_result = {"training_iteration": 2}
    for _ in range(2):
        for trial in trials:
            warning.on_trial_start(0, trials, trial)
    (record,) = caplog.records
    assert (
        "starts over: it was paused and has saved no checkpoint. With MedianStoppingRule"
        in record.getMessage()
    )


def test_the_progress_knows_the_hyperparameters_and_the_schedulers_end(new_output):
    space = {"x": tune.uniform(0, 1), "net": {"a": tune.sample_from(lambda _: 1)}, "constant": 3}
    given = settings(config=space, scheduler=ASHAScheduler(max_t=7), metric="loss", mode="min")
    (shown,) = [each for each in given["callbacks"] if isinstance(each, ProgressCallback)]
    assert shown.searched == ["x", "net/a"] and shown.ends == {"training_iteration": 7.0}


def test_metric_and_mode_are_known_wherever_they_were_given():
    given = {"metric": "loss", "mode": "min"}
    searcher = BayesOptSearch({"x": (0.0, 1.0)}, **given)
    scheduler = ASHAScheduler(**given)
    schedulers = [{"scheduler": each} for each in (scheduler, ResourceChangingScheduler(scheduler))]
    for arguments in (given, {"search_alg": searcher}, *schedulers):
        assert metric_and_mode(arguments) == ("loss", "min")
    assert metric_and_mode({"config": {}}) == (None, None)


def test_a_progress_callback_of_the_users_own_is_the_only_one(new_output):
    own = ProgressCallback("loss", "min")
    prepared = settings(callbacks=[own])
    assert prepared["verbose"] == 0
    assert [each for each in prepared["callbacks"] if isinstance(each, ProgressCallback)] == [own]


def test_a_search_is_prepared_however_its_trainable_is_named(new_output):
    trainable = DistributedTrainableCreator(train, num_slots=2)
    tune.register_trainable("registered_training", trainable)
    space = {"x": tune.uniform(0, 1)}
    experiment = tune.Experiment("named", "registered_training", config=space)
    searches = {trainable: {"config": space}, "registered_training": {"config": space}, experiment: {}}
    for run, arguments in [*searches.items(), ([experiment], {})]:
        with prepare(run, arguments) as prepared:
            (metadata,) = [each for each in prepared["callbacks"] if isinstance(each, ExperimentMetadata)]
            assert any(isinstance(each, ProgressCallback) for each in prepared["callbacks"])
        assert metadata._metadata["space"]["x"]["text"] == "uniform(0, 1)"


def test_a_space_that_only_the_searcher_has_is_recorded():
    search = BayesOptSearch({"x": (0.0, 1.0), "net": {"lr": tune.loguniform(1e-3, 1)}}, "loss", "min")
    for given in (search, ConcurrencyLimiter(search, max_concurrent=2)):
        known = search_metadata({"search_alg": given}, {"epochs": 3}, "loss", "min")
        texts = {name: one["text"] for name, one in known["space"].items()}
        assert texts == {"x": "uniform(0, 1)", "net/lr": "loguniform(0.001, 1)"}
        assert known["constants"] == {"epochs": 3}


def test_a_search_is_prepared_in_a_process_that_has_tunes_function_before_ours(tmp_path):
    """As in `tune.run(horovod_tune.DistributedTrainableCreator(...))`, and where Ray Client runs Tune."""
    trainable = DistributedTrainableCreator(lambda config: None, num_slots=2)
    (tmp_path / "search").write_bytes(cloudpickle.dumps((tune.run, trainable)))
    program = (
        "import inspect, pickle, sys, ray.tune; before = ray.tune.run\n"
        "run, trainable = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(run is before, 'num_samples' in inspect.signature(run).parameters)\n"
        "try: run(trainable, resources_per_trial={})\n"
        "except ValueError as error: print(type(error).__name__)"
    )
    assert run_python("-c", program, tmp_path / "search").stdout.split() == ["True", "True", "SpecError"]


@pytest.mark.slow
def test_a_metric_that_no_trial_reports_is_named_with_those_that_are_reported(
    ray_session, new_output, tmp_path, capsys
):
    trainable = DistributedTrainableCreator(lambda config: {"loss": 1.0, "accuracy": 0.5})
    with pytest.raises(MetricNotReported, match=r"^trials report 'loss', 'accuracy'; metric='los' was"):
        tune.run(trainable, metric="los", mode="min", storage_path=str(tmp_path))
    said = capsys.readouterr().out
    assert "search ended" not in said
    assert re.search(r"^searching with \S+, 1 rank per trial: 1 node with \d+ CPUs", said)


@pytest.mark.parametrize(
    ("asked", "before", "said"),
    [
        ("acc", {}, "trials report 'epoch'; metric='acc' was requested (by tune.TuneConfig())"),
        (
            "acc",
            {"acc": {"last": 1}},
            "report 2 of trial t lacks metric='acc' (of tune.TuneConfig()), which other",
        ),
        (["acc", "f1"], {}, "trials report 'epoch'; metric=['acc', 'f1'] was requested (by BayesOptSearch)"),
        (
            ["acc", "f1"],
            {"f1": {"last": 1}},
            "report 2 of trial t lacks metric=['acc', 'f1'] (of BayesOptSearch)",
        ),
    ],
)
def test_the_error_of_a_metric_that_a_report_lacks_is_true_and_has_the_cure_of_tunes_own(asked, before, said):
    trainable = DistributedTrainableCreator(train)
    several = isinstance(asked, list)
    searcher = BayesOptSearch(metric=asked, mode=["max", "max"]) if several else BayesOptSearch()
    trial = SimpleNamespace(get_trainable_cls=lambda: trainable, metric_analysis=before)
    controller = SimpleNamespace(
        _metric=None if several else asked,
        _scheduler_alg=SimpleNamespace(metric=None),
        _search_alg=searcher,
        get_trials=lambda: [trial],
    )
    result = {"epoch": 1, "training_iteration": 2, "trial_id": "t", "config/x": 1}
    with pytest.raises(MetricNotReported) as raised:
        TuneController._validate_result_metrics(controller, result)
    assert str(raised.value).startswith(said)
    assert "TUNE_DISABLE_STRICT_METRIC_CHECKING=1" in str(raised.value)


def test_a_metric_or_mode_that_searcher_and_tuner_were_given_differently_is_a_warning(caplog):
    search = BayesOptSearch(metric="acc", mode="min")
    search.set_search_properties("loss", "max", {"x": tune.uniform(0, 1)})
    search.set_search_properties("loss", "max", {"x": tune.uniform(0, 1)})
    assert [record.getMessage() for record in caplog.records] == [
        "metric='loss' of the tuner counts, not metric='acc' of BayesOptSearch",
        "mode='max' of the tuner counts, not mode='min' of BayesOptSearch",
    ]
    caplog.clear()
    for own_space, which in (
        (None, "the tuner's counts"),
        ({"x": 1}, "its own, and the tuner's for all else, counts"),
    ):
        theirs = SimpleNamespace(metric="acc", mode="max", space=own_space)
        warns = UnusedArguments({"search_alg": ConcurrencyLimiter(BayesOptSearch(), 1), "metric": "loss"})
        warns.setup(total_num_samples=1)
        warns = UnusedArguments({"search_alg": theirs, "metric": "loss", "mode": "max"})
        theirs.metric = theirs.metric if own_space else "loss"  # as Tune does
        warns.setup(total_num_samples=1)
        (record,) = caplog.records
        assert record.getMessage() == (
            "metric='acc' was given to SimpleNamespace, and metric='loss' to the tuner: "
            f"{which} for the search"
        )
        caplog.clear()


@pytest.mark.parametrize(
    ("num_samples", "total", "resume", "warns"),
    [
        (20, 10, True, True),
        (5, 10, "AUTO", True),
        (10, 20, True, False),
        (20, 10, None, False),
        (-1, 10, True, True),
    ],
)
def test_more_samples_of_a_search_that_continues_are_a_warning(num_samples, total, resume, warns, caplog):
    space = {"x": tune.grid_search([1, 2, 3]), "y": tune.uniform(0, 1)} if num_samples == 5 else {}
    arguments = {"num_samples": num_samples, "resume": resume, "config": space}
    UnusedArguments(arguments).setup(num_samples=num_samples, total_num_samples=total)
    said = "".join(record.getMessage() for record in caplog.records)
    assert (f"num_samples={num_samples} is not used" in said and "analysis=" in said) == warns


def test_during_a_search_warnings_come_once_or_not_if_the_last_screen_has_them(new_output, caplog):
    snapshots = logging.getLogger("ray.tune.execution.experiment_state")
    of_tune = logging.getLogger("ray.tune.tune")
    said = []
    for arguments in ({"verbose": 0}, {}):
        with search(**arguments):
            for _ in range(3):
                snapshots.warning("Experiment state snapshotting has been triggered multiple times")
            if not arguments:
                of_tune.warning("Trials did not complete: [a, b]")
            of_tune.warning("news")
        said.append([record.name for record in caplog.records])
        caplog.clear()
    assert said == [[snapshots.name, of_tune.name]] * 2, "once per search"
    of_tune.warning("Trials did not complete: [a, b]")
    assert len(caplog.records) == 1, "after the search it is Tune's again"


def test_the_raylets_paragraph_on_a_dead_process_is_left_out(new_output, capsys):
    def raylet_says(*lines):
        print_to_stdstream({"lines": [*lines], "pid": "raylet", "is_err": False}, ignore_prefix=False)
        return capsys.readouterr().out

    died = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    with search():
        said = raylet_says(died, "The node has no memory left.")
    assert "A worker died" not in said and "The node has no memory left." in said
    assert "A worker died" in raylet_says(died), "after the search Ray prints what it did"
