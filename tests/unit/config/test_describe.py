"""The settings table: complete, and fit to be printed."""

from balanceroute.config import describe_settings

SETTINGS = describe_settings()


def test_every_setting_has_a_type_a_default_and_a_sentence() -> None:
    for setting in SETTINGS:
        assert setting.type and setting.default, setting.path
        assert setting.description.endswith("."), setting.path
        assert not {"|", "\n"} & set(setting.type + setting.default + setting.description), setting.path


def test_settings_are_listed_by_their_key_path() -> None:
    rows = {setting.path: (setting.type, setting.default) for setting in SETTINGS}
    assert rows["listen.port"] == ("an integer, 0 to 65535", "8000")
    assert rows["decode.workers[].dp_rank"] == ("an integer, 0 to 4095, or null", "unset")
    assert rows["limits.first_byte_timeout_s.decode"] == ("a number, more than 0 and at most 86400", "120")
    assert rows["connector"] == ("one of mooncake_v1, nixl, mooncake_layerwise", "mooncake_v1")
