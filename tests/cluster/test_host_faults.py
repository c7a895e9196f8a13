"""A host that is lost, cut off or shut in mid-training: the trial continues, or fails naming it in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults import FAULTS, LOST, Fault
from host_faults import hosts, run
from steady import Training, steady_training

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
# More than twice the cut that is to be ridden out: TCP asks again after 12, 13 or up to 24 s then.
TIMEOUT_S = 30.0
# All of them take half an hour: `host_faults.py` itself.
TESTED = ("link down 12 s", "link down, rank 0", "packets dropped")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    log = tmp_path_factory.mktemp("faults") / "driver.log"
    with hosts() as lab, steady_training(lab, log, timeout_s=TIMEOUT_S) as training:
        yield training


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name) for fault in FAULTS if fault.name in TESTED]
)
def test_the_trial_continues_or_fails_in_time_with_the_name_of_what_was_lost(
    training: Training, fault: Fault
) -> None:
    print(run(training, fault))


def switch_off(training: Training, host: str) -> None:
    """What a cloud does: a notice, and no power."""
    lab = training.lab
    lab.drain(host)
    lab.power_off(host)


def test_a_host_that_its_cloud_switches_off_is_named_and_not_counted(training: Training) -> None:
    row = run(training, Fault("switched off", switch_off, error=f"preempted: {LOST}", loses_host=True))
    assert row["counted_failures"] == 0
