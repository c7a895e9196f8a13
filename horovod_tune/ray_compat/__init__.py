"""All private APIs of Ray that this package uses, in one place. Checked against Ray 2.60.0.

Each use checks, with `compatibility`, that Ray has the shape that the use was written for. `patches/` has one
file per part of Tune that is changed. `training_result` is not imported here, since it imports Ray Data and
pandas, which a rank does not need.
"""
# ruff: noqa: F401 - imported for the rest of the package

from horovod_tune.ray_compat.patches.actors import reuse_actors_of, start_in_idle_processes
from horovod_tune.ray_compat.patches.drawn_values import draw_with
from horovod_tune.ray_compat.patches.failures import explain_failures, name_missing_metric
from horovod_tune.ray_compat.patches.paused_trials import mend_paused_trials
from horovod_tune.ray_compat.patches.resized_trials import check_resized_trials
from horovod_tune.ray_compat.patches.tune_run import (
    metric_and_mode,
    prepare_runs,
    shows_tunes_own_output,
    trainables_of,
    without_reporter,
)
from horovod_tune.ray_compat.queries import (
    HostPreempted,
    announce_end,
    check_cluster_holds,
    cluster_size,
    draining_nodes,
    driver_node_id,
    free_on_remaining_nodes,
    is_preempted,
    most_bytes_of_a_function,
    private_directory,
    reports_of,
    resources_of_nodes,
    rotated_output,
)
from horovod_tune.ray_compat.schedules import (
    describe_scheduler,
    describe_searcher,
    space_of,
    time_attr_of,
)
from horovod_tune.ray_compat.tune_session import (
    after_import,
    forget_classes,
    install_session,
    prepare_rank_process,
)
