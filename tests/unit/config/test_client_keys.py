"""The file of client keys, and the one line that says what is wrong with it."""

from pathlib import Path

import pytest

from balanceroute.config import digest_of, load, new_key, read_client_keys, to_yaml
from balanceroute.errors import ConfigError

HASH = "ab" * 32
WORKERS = "prefill: {workers: [{url: http://p:1}]}\ndecode: {workers: [{url: http://d:1}]}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return path


def test_an_entry_has_a_name_a_hash_and_what_it_may_use(tmp_path: Path) -> None:
    text = f"keys:\n- {{name: a, sha256: '{HASH.upper()}', priority: {{min: 1, max: 3}}, max_in_flight: 4}}\n"
    (entry,) = read_client_keys(written(tmp_path, text))
    assert (entry.name, entry.sha256, entry.max_in_flight, entry.tokens_per_minute) == ("a", HASH, 4, None)
    assert entry.priority is not None and (entry.priority.min, entry.priority.max) == (1, 3)


def test_an_empty_list_of_keys_is_valid_and_admits_no_client(tmp_path: Path) -> None:
    assert read_client_keys(written(tmp_path, "keys: []\n")) == read_client_keys(written(tmp_path, "[]\n")) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; accepted is a list of keys, as `balanceroute key` makes it ([] for none)"),
        ("alice: sk-br-secret\n", "is a mapping; accepted is a list of keys, as `balanceroute key` makes it"),
        ("search-team\n", "is a single value; accepted is a list of keys"),
        ("- a\n", "keys[0]: accepted is a mapping with the keys name, sha256, priority"),
        ("keys: {}\n", "keys: accepted is a list of keys"),
        ("keys: []\nkey: []\n", "key: unknown key; accepted are keys"),
        ("keys: [{name: a}]\n", "keys[0].sha256: required and missing"),
        (f"keys: [{{name: a, sha256: {'1' * 64}}}]\n", "keys[0].sha256: accepted is text; write it in quotes if it"),
        (
            f"keys: [{{name: a, sha256: {'1' * 5000}}}]\n",
            "line 1, column 26: not valid YAML: a number of more than 400",
        ),
        ("keys: [{name: a, sha256: sk-br-secret}]\n", "keys[0].sha256: accepted are the 64 hex digits"),
        (f"keys: [{{name: 'a b', sha256: '{HASH}'}}]\n", "keys[0].name: accepted are"),
        (f"keys: [{{name: a, sha256: '{HASH}', key: sk-br-secret}}]\n", "keys[0].key: unknown key; accepted are name"),
        (
            f"keys: [{{name: a, sha256: '{HASH}', priority: 1}}]\n",
            "priority: accepted is a mapping with the keys min, max",
        ),
        (
            f"keys: [{{name: a, sha256: '{HASH}', priority: {{low: 1}}}}]\n",
            "priority.low: unknown key; accepted are min, max",
        ),
        (f"keys: [{{name: a, sha256: '{HASH}', max_in_flight: 0}}]\n", "accepted is an integer, 1 to 1000000"),
        (f"keys: [{{name: a, sha256: '{HASH}', priority: {{min: 2, max: 1}}}}]\n", "a min that is not above max"),
        (f"keys: [{{name: a, sha256: '{HASH}'}}, {{name: b, sha256: '{HASH}'}}]\n", "keys[1].sha256: the same as"),
        (f"keys: [{{name: a, sha256: '{HASH}'}}, {{name: a, sha256: '{HASH[::-1]}'}}]\n", "keys[1].name: the same"),
    ],
)
def test_a_wrong_key_file_is_reported_in_one_line_without_a_secret(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_client_keys(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and expected in line and "\n" not in line and "sk-br-secret" not in line


def test_a_missing_key_file_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.yaml: cannot be read"):
        read_client_keys(Path("/nowhere.yaml"))


def test_every_new_key_is_unique_and_matches_its_hash() -> None:
    keys = [new_key() for _ in range(100)]
    assert len({key for key, _ in keys}) == 100 and all(len(key) > 40 for key, _ in keys)
    assert all(digest_of(key.encode()).hex() == digest for key, digest in keys)


@pytest.mark.parametrize(
    ("section", "variable", "key"),
    [
        ("", "sk-env\n", "sk-env"),
        ("auth: {worker_api_key: sk-file}\n", "sk-env", "sk-file"),
        ("auth: {worker_api_key: null}\n", "sk-env", None),
        ("auth:\n", "sk-env", "sk-env"),
        ("", " ", None),
    ],
    ids=["variable", "file-above-it", "null-is-a-word", "empty-section", "blank"],
)
def test_openai_api_key_is_the_workers_key_unless_the_settings_name_another(
    tmp_path: Path, section: str, variable: str, key: str | None
) -> None:
    path = written(tmp_path, WORKERS + section)
    given = load(path, {"OPENAI_API_KEY": variable}).auth.worker_api_key
    assert (None if given is None else given.get_secret_value()) == key


@pytest.mark.parametrize("secret", ["", "two words", "caf\u00e9", "a\nb"])
@pytest.mark.parametrize("name", ["admin_token", "worker_api_key"])
def test_a_secret_that_no_header_can_carry_is_refused_without_showing_it(
    tmp_path: Path, name: str, secret: str
) -> None:
    path = written(tmp_path, WORKERS)
    with pytest.raises(ConfigError, match=rf"auth\.{name} = \*+: accepted are printable") as caught:
        load(path, {}, {f"auth.{name}": secret})
    assert not secret or secret not in str(caught.value)


def test_a_key_may_be_named_like_a_number(tmp_path: Path) -> None:
    entries = [{"name": name, "sha256": new_key()[1]} for name in ("1e3", "12", "0x1f", "no")]
    assert [entry.name for entry in read_client_keys(written(tmp_path, to_yaml(entries)))] == [
        "1e3",
        "12",
        "0x1f",
        "no",
    ]
