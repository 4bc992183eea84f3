"""The settings table: complete, and fit to be printed."""

import pytest

from balanceroute.config import Setting, describe_settings

SETTINGS = describe_settings()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_every_setting_has_a_type_a_default_and_a_sentence(setting: Setting) -> None:
    assert setting.type
    assert setting.default
    assert setting.description.endswith(".")
    assert not {"|", "\n"} & set(setting.type + setting.default + setting.description)


def test_settings_are_listed_by_their_key_path() -> None:
    rows = {setting.path: (setting.type, setting.default) for setting in SETTINGS}
    assert rows["listen.port"] == ("an integer, 0 to 65535", "8000")
    assert rows["decode.workers[].dp_rank"] == ("an integer, 0 to 4095, or null", "unset")
    assert rows["limits.first_byte_timeout_s.decode"] == ("a number, more than 0 and at most 86400", "120")
    assert rows["connector"] == ("one of mooncake_v1, nixl, mooncake_layerwise", "mooncake_v1")
