"""All private APIs of Ray that this package uses, in one place. Checked against Ray 2.60.0.

- `queries`: the driver's node, a trial's earlier reports, the cluster's resources and whether it can grow,
  draining and preempted nodes, the largest function, the session's directory on a host, rotated output; the
  error that Tune does not count as a failure,
- `schedules`: a scheduler's time attribute and settings, a searcher's space, the slots that limiters count,
- `tune_session`: the module-level session behind ``ray.tune.report`` and ``ray.tune.get_context``,
- `training_result`: Tune's class for what a trainable's `save` returns; not imported here, since it imports
  Ray Data and pandas, which a rank does not need,
- `patches/`: one file per part of Tune that is changed.

Each module checks, with `compatibility`, that Ray has the shape that the module was written for.
"""
# ruff: noqa: F401 - imported for the rest of the package

from horovod_tune.ray_compat.patches.actors import reuse_actors_of, start_in_idle_processes
from horovod_tune.ray_compat.patches.drawn_values import draw_with
from horovod_tune.ray_compat.patches.failures import explain_failures, name_missing_metric
from horovod_tune.ray_compat.patches.paused_trials import mend_paused_trials
from horovod_tune.ray_compat.patches.resized_trials import check_resized_trials
from horovod_tune.ray_compat.patches.tune_run import (
    Prepare,
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
from horovod_tune.ray_compat.tune_session import install_session, prepare_rank_process
