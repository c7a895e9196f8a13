"""Runs in the driver: continues an experiment when its job is started again."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray import tune


def resume_or_start(
    trainable: Any,
    *,
    run_config: tune.RunConfig,
    param_space: dict[str, Any] | None = None,
    tune_config: tune.TuneConfig | None = None,
) -> tune.Tuner:
    """Return a `Tuner` that continues the experiment `run_config.name`, or starts it if it does not exist.

    Use this in jobs that are requeued, preempted or simply submitted again. Completed trials are not run
    again; all others, failed ones too, continue from their last checkpoint. The search algorithm, the
    scheduler and the rest of `tune_config` (such as `num_samples`) are those of the first start. The search
    algorithm keeps what it has learnt; Tune's own schedulers do not.

    Args:
        trainable: as for `Tuner`; must be the same at every start.
        run_config: its `name` and `storage_path` identify the experiment.
        param_space: as for `Tuner`.
        tune_config: as for `Tuner`.

    Raises:
        ValueError: `run_config` has no name, or the experiment's folder holds results, but a file that Ray
            needs to continue the search is missing or damaged.
    """
    from pyarrow import fs
    from ray import tune

    from horovod_tune.ray_compat import queries
    from horovod_tune.run_settings import warn_of_unused_samples

    if not run_config.name:
        raise ValueError(
            f"run_config.name must be set, got {run_config.name!r}: otherwise, each start is a new experiment"
        )
    filesystem, path = _folder_of(run_config)
    has_tuner = tune.Tuner.can_restore(path, storage_filesystem=filesystem)
    _refuse_broken_results(path, filesystem or fs.LocalFileSystem(), has_tuner=has_tuner)
    if not has_tuner:
        return tune.Tuner(trainable, run_config=run_config, param_space=param_space, tune_config=tune_config)
    tuner = tune.Tuner.restore(
        path,
        trainable,
        resume_unfinished=True,
        resume_errored=True,
        param_space=param_space,
        storage_filesystem=filesystem,
    )
    if tune_config is not None and queries.num_samples_of(tuner) not in (None, tune_config.num_samples):
        warn_of_unused_samples(tune_config.num_samples)
    return tuner


def _folder_of(run_config: tune.RunConfig) -> tuple[FileSystem | None, str]:
    """Return the filesystem and the path of the experiment's folder, resolved as Ray resolves them.

    A URI is split before the name is appended: its query is not part of the path, and a name may have
    characters that a URI may not. The path of a local folder needs no filesystem.
    """
    from pyarrow import fs

    filesystem, root = run_config.storage_filesystem, str(run_config.storage_path)
    if filesystem is None and urllib.parse.urlparse(root).scheme:
        filesystem, root = fs.FileSystem.from_uri(root)
        if isinstance(filesystem, fs.LocalFileSystem):
            filesystem = None
    return filesystem, Path(root, str(run_config.name)).expanduser().as_posix()


def _refuse_broken_results(path: str, files: FileSystem, *, has_tuner: bool) -> None:
    """Raise ValueError if ``path`` holds a search that Ray cannot continue, but would start again."""
    from pyarrow import fs

    infos = files.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = sorted(info.base_name for info in infos)
    states = [name for name in names if name.startswith("experiment_state-")]
    results = [] if states else [f"{name}/result.json" for name in names]
    sizes = [info.size for info in files.get_file_info([f"{path}/{result}" for result in results])]
    found = states[-1:] or [result for result, size in zip(results, sizes, strict=True) if size]
    if not found:
        return
    why = "the file tuner.pkl is missing. Put it back"
    if has_tuner and not states:
        why = "no file experiment_state-*.json is left. Put one back"
    elif has_tuner:
        try:
            with files.open_input_stream(f"{path}/{found[0]}") as stream:
                json.loads(stream.read())
            return
        except ValueError as error:  # its copy was cut: the driver was killed, or the disk full
            cure = "Delete it to continue from an earlier one of its kind" if states[1:] else "Restore it"
            why = f"that file is damaged ({error}). {cure}"
    raise ValueError(
        f"{path} holds a search ({found[0]}) that cannot be continued: {why}, or set another run_config.name "
        "to start a new search."
    )
