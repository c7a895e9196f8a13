"""Tune's upload of the experiment state is not atomic.

`_upload_to_fs_path` copies the driver's files over those in `storage_path` with `pyarrow.fs.copy_files`,
which truncates each file before it writes it. A driver that is killed meanwhile, or a disk that is full,
leaves `experiment_state-*.json` and the `result.json` of ended trials cut, and the experiment cannot be
restored. This happens up to several times per second if checkpoints are frequent and `num_to_keep` is set.

Proposed fix: on a local filesystem copy each changed file to a temporary name in the same folder, then
`os.replace` it; on others upload to a temporary key and move it. Checked with Ray 2.60.0; needs no cluster.
"""

import resource
import signal

import pyarrow.fs
import pytest
from ray.train._internal.storage import _upload_to_fs_path


def test_an_upload_that_is_cut_leaves_the_earlier_file(tmp_path):
    staged, stored = tmp_path / "driver_artifacts", tmp_path / "stored"
    staged.mkdir()
    state = staged / "experiment_state-2026.json"
    state.write_text("earlier")
    _upload_to_fs_path(str(staged), pyarrow.fs.LocalFileSystem(), str(stored))
    state.write_text("x" * 1_000_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # stands for a kill, or a full disk
    try:
        with pytest.raises(OSError):
            _upload_to_fs_path(str(staged), pyarrow.fs.LocalFileSystem(), str(stored))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (stored / state.name).read_text() == "earlier"
