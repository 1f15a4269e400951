"""Targets: names are checked where a user types them, devices get the nearest row."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import find_target, target_of_device
from fusec.errors import UsageError


def test_a_device_between_two_rows_takes_the_older_one_under_its_own_name():
    target = target_of_device("sm_89")
    assert target.name == "sm_89"
    assert target.machine is find_target("sm_80").machine
    assert target_of_device("sm_90").machine is find_target("sm_90").machine


def test_unknown_names_and_devices_too_old_are_usage_errors():
    for find in (find_target, target_of_device):
        with pytest.raises(UsageError, match="sm_80"):
            find("sm_70")
    with pytest.raises(UsageError):
        find_target("sm_91")
