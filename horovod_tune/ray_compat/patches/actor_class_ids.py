"""Patches how Ray names actor classes: who is forked after an import of Ray Tune draws ids of its own."""

from __future__ import annotations

import os

from horovod_tune.compatibility import Patch, part

_PATCH = Patch(
    "ids of actor classes",
    "ranks that are started later each load Ray Tune themselves, which takes a second",
    (
        part("ray.actor:_make_actor", "cls", "actor_options", uses="ActorClassID from_random"),
        part("ray.actor:ActorClassID"),
    ),
)


def draw_actor_class_ids_from_the_system() -> bool:
    """Let actor classes get their ids from the operating system; False where Ray's parts differ.

    Ray draws an id for each actor class that is defined, and Ray Tune's modules define some. Ray's generator
    is seeded by its first use and copied by a fork: processes forked after that draw the same ids, one after
    another. Two that start at the same time then give the same id to the object with which they warm up the
    object store; one of them aborts, and Ray waits 60 s for it.
    """
    if not _PATCH.fits:
        return False
    import ray.actor
    from ray import ActorClassID

    class FromSystem:
        @staticmethod
        def from_random() -> ActorClassID:
            return ActorClassID(os.urandom(ActorClassID.size()))

    ray.actor.ActorClassID = FromSystem  # type: ignore[misc, assignment]
    return True
