"""A rank imports Horovod in one thread while others work."""

from __future__ import annotations

import threading
from typing import Any

import ray


def test_a_rank_finds_horovods_library_whatever_other_threads_ask_of_python(ray_session: Any) -> None:
    class Rank:
        """A rank whose main thread fills Python's table of its build as slowly as the imports allow."""

        def find_horovod(self) -> bool:
            import sysconfig

            from horovod_tune.actors.training_actor import TrainingActor
            from horovod_tune.gloo.horovod_world import HorovodWorld

            python: Any = sysconfig
            fill = python._init_posix

            def fill_slowly(table: dict[str, Any]) -> None:
                for thread in threading.enumerate():
                    if thread.name == "ray_import" and thread is not threading.current_thread():
                        thread.join(120)
                fill(table)

            python._init_posix = fill_slowly
            python._CONFIG_VARS, python._CONFIG_VARS_INITIALIZED = None, False
            rank = TrainingActor(HorovodWorld)
            sysconfig.get_paths()
            rank.load()
            import horovod.torch

            return bool(horovod.torch._MPI_LIB_AVAILABLE)

    assert ray.get(ray.remote(Rank).remote().find_horovod.remote(), timeout=180)
