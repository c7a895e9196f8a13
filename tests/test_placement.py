"""Whether a cluster can ever hold a trial."""

import pytest

from horovod_tune.errors import ResourcesUnavailable
from horovod_tune.spec.placement import check_fits
from horovod_tune.spec.trial_spec import make_spec


def test_a_trial_that_can_never_fit_is_an_error_that_says_both_sides():
    placement = make_spec(num_hosts=2, num_slots=3).placement()
    with pytest.raises(ResourcesUnavailable) as raised:
        check_fits(placement, [{"CPU": 8.0}, {"CPU": 2.0}])
    text = str(raised.value)
    assert "2 x 3 CPU on different machines" in text
    assert "2 node(s) have 8 CPU; 2 CPU" in text


def test_hosts_that_fit_only_on_one_machine_do_not_fit():
    placement = make_spec(num_hosts=2, num_slots=1).placement()
    with pytest.raises(ResourcesUnavailable):
        check_fits(placement, [{"CPU": 64.0}])
    check_fits(placement, [{"CPU": 1.0}, {"CPU": 1.0}])


def test_a_total_may_be_larger_than_one_node():
    check_fits(make_spec(num_workers=5).placement(), [{"CPU": 2.0}, {"CPU": 4.0}])
