"""Where a value comes from, and the one line that says what is wrong with it."""

import math
from pathlib import Path

import pytest

from balanceroute.build import policy_settings, scheduler_config
from balanceroute.config import (
    Config,
    assumptions,
    describe_settings,
    effective_json,
    effective_yaml,
    load,
    parse_assignment,
    unused_variables,
)
from balanceroute.core.policies import POLICIES
from balanceroute.errors import ConfigError

WORKERS = "prefill: {workers: [{url: http://p:1}]}\ndecode: {workers: [{url: http://d:1}, {url: http://d:2}]}\n"


def from_yaml(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load(path, environ)


def refusal(tmp_path: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text, **environ)
    return str(caught.value)


def test_a_list_of_workers_is_a_sufficient_configuration(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, WORKERS)
    assert config.routing.policy == "level_fit"
    assert [worker.worker_id for worker in config.decode.workers] == ["d:1", "d:2"]


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, WORKERS + "routing:\n").routing.horizon_steps == 80


@pytest.mark.parametrize("value", ["5", "text", "[a]"])
def test_a_section_that_is_none_is_refused_where_the_workers_key_is_in_the_environment(
    tmp_path: Path, value: str
) -> None:
    said = refusal(tmp_path, WORKERS + f"auth: {value}\n", OPENAI_API_KEY="key")
    assert "c.yaml: auth = ********: accepted is a mapping with the keys worker_api_key" in said


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(WORKERS + "routing: {policy: br_h, r_max: 9, s_greedy: 9, horizon_steps: 9}\n")
    environ = {"BALANCEROUTE_ROUTING__R_MAX": "10", "BALANCEROUTE_ROUTING__S_GREEDY": "10"}
    routing = load(path, environ, {"routing.r_max": 11}).routing
    assert (routing.alpha, routing.horizon_steps, routing.s_greedy, routing.r_max) == (1.0, 9, 10, 11)


def test_zero_is_a_value_and_null_is_unset(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, WORKERS + "routing: {policy: br_0, beta: 0, max_wait_s: null}\n")
    assert (config.beta, config.routing.max_wait_s) == (0.0, None)


def test_load_changes_neither_the_environment_nor_the_overrides(tmp_path: Path) -> None:
    environ, overrides = {"BALANCEROUTE_LOG__LEVEL": "debug"}, {"listen.port": 1}
    (tmp_path / "c.yaml").write_text(WORKERS)
    load(tmp_path / "c.yaml", environ, overrides)
    assert (environ, overrides) == ({"BALANCEROUTE_LOG__LEVEL": "debug"}, {"listen.port": 1})


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        ("ROUTING__POLICY", "br_0", "routing.policy", "br_0"),
        ("ROUTING__BETA", "null", "routing.beta", None),
        ("ROUTING__BETA", "", "routing.beta", None),
        ("ROUTING__HOLD_S", "1e-1", "routing.hold_s", 0.1),
        ("RETRY__RESUME_ON_WORKER_LOSS", "false", "retry.resume_on_worker_loss", False),
        ("PREDICTOR__HISTORY", "123", "predictor.history", "123"),
        ("LOG__LEVEL", "WARNING", "log.level", "warning"),
        ("CONNECTOR", "nixl", "connector", "nixl"),
        ("LIMITS__FIRST_BYTE_TIMEOUT_S__PREFILL", "7", "limits.first_byte_timeout_s.prefill", 7.0),
        ("routing__r_max", "3", "routing.r_max", 8),  # variables are upper case: this is not one of ours
    ],
)
def test_a_variable_is_read_as_the_type_of_its_setting(
    tmp_path: Path, variable: str, text: str, path: str, value: object
) -> None:
    name = variable if variable.islower() else f"BALANCEROUTE_{variable}"
    got: object = from_yaml(tmp_path, WORKERS, **{name: text})
    for part in path.split("."):
        got = getattr(got, part)
    assert got == value


def test_a_variable_replaces_a_whole_list_of_workers(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, WORKERS, BALANCEROUTE_DECODE__WORKERS='[{"url": "http://e:1", "dp_rank": 3}]')
    assert [worker.worker_id for worker in config.decode.workers] == ["e:1@3"]


def test_variables_that_kubernetes_makes_for_a_service_are_not_settings(tmp_path: Path) -> None:
    made = {
        "BALANCEROUTE_PORT": "tcp://10.0.0.9:8000",
        "BALANCEROUTE_SERVICE_HOST": "10.0.0.9",
        "BALANCEROUTE_PORT_8000_TCP_ADDR": "10.0.0.9",
    }
    assert from_yaml(tmp_path, WORKERS, **made) == from_yaml(tmp_path, WORKERS)


def test_an_assignment_is_read_as_the_type_of_its_setting() -> None:
    assert parse_assignment("routing.r_max=4") == ("routing.r_max", 4)
    assert parse_assignment("predictor.history=a=b") == ("predictor.history", "a=b")


def test_an_assignment_needs_a_key_and_a_value() -> None:
    with pytest.raises(ConfigError, match=r"command line: 'routing.r_max': accepted is KEY=VALUE"):
        parse_assignment("routing.r_max")


WRONG = [
    # what is written after the workers, what the line must say
    ("routing: {horizon_step: 80}", "routing.horizon_step: unknown key; did you mean routing.horizon_steps?"),
    ("horizon_steps: 80", "horizon_steps: unknown key; did you mean routing.horizon_steps?"),
    ("max_entries: 80", "max_entries: unknown key; did you mean pool.max_entries?"),  # and not metrics
    ("pool.max_entries: 80", "pool.max_entries: unknown key; did you mean pool: {max_entries: ...}?"),
    (
        "auth: {allowed_origins: http://a}",
        "auth.allowed_origins = 'http://a': accepted is a list of texts: [ONE, OTHER]",
    ),
    ("rooting: {}", "rooting: unknown key; did you mean routing?"),
    ("pool: {max: 3}", "pool.max: unknown key; did you mean pool.max_entries?"),
    ("routing: {policy: br_1}", "routing.policy = 'br_1': accepted is one of br_0, br_h, target_fit, level_fit,"),
    ("routing: {gamma: 1.5}", "routing.gamma = 1.5: accepted is a number, more than 0 and at most 1"),
    ("routing: {gamma: .nan}", "routing.gamma = nan: accepted is a number"),
    ("routing: {alpha: .inf}", "routing.alpha = inf: accepted is a number"),
    ("routing: {r_max: 65}", "routing.r_max = 65: accepted is an integer, 1 to 64"),
    ("routing: {r_max: 8.5}", "routing.r_max = 8.5: accepted is an integer, 1 to 64"),
    ("routing: {r_max: '8'}", "routing.r_max = '8': accepted is an integer, 1 to 64"),
    ("routing: {r_max: true}", "routing.r_max = true: accepted is an integer, 1 to 64"),
    ("routing: {r_max: null}", "routing.r_max = null: accepted is an integer, 1 to 64"),
    ("routing: {pool_bypass: 1}", "routing.pool_bypass = 1: accepted is true or false"),
    ("routing: br_h", "routing = 'br_h': accepted is a mapping with the keys policy, horizon_steps"),
    (
        "routing: {candidate_order: lifo}",
        "routing.candidate_order = 'lifo': accepted is one of fifo, ascending",
    ),
    (
        "connector: mooncake",
        "connector = 'mooncake': accepted is one of mooncake_v1, nixl, mooncake_layerwise",
    ),
    ("listen: {port: 70000}", "listen.port = 70000: accepted is an integer, 0 to 65535"),
    ("listen: {host: 'a b'}", "listen.host = 'a b': accepted is a host name or an IP address"),
    (
        "listen: {host: '*'}",
        "listen.host = '*': accepted is a host name or an IP address without brackets, such as 0.0.0.0",
    ),
    ("listen: {host: 'h:80'}", "listen.host = 'h:80': accepted is a host name or an IP address; the port"),
    (
        "predictor: {kind: null}",
        "predictor.kind = null: accepted is one of none, survival, exact_match, learned",
    ),
    ("predictor: {kind: learned}", "predictor.kind = 'learned': needs predictor.model"),
    (
        "predictor: {key_header: X-Task}",
        "predictor.key_header = 'X-Task': accepted only with predictor.kind exact_",
    ),
    (
        "predictor: {kind: none, model: m}",
        "predictor.model = 'm': accepted only with predictor.kind survival, exact_match or learned, not none",
    ),
    (
        "predictor: {kind: exact_match, key_header: 'a b'}",
        "predictor.key_header = 'a b': accepted is the name",
    ),
    (
        "routing: {policy: br_h, pool_bypass: true}",
        "routing.pool_bypass = true: accepted only with routing.policy br_0",
    ),
    ("routing: {beta: 43}", "routing.beta: level_fit does not have this knob; br_0, br_h have it"),
    ("routing: {policy: br_0, gamma: 0.9}", "routing.gamma: br_0 does not have this knob; br_h has it"),
    ("routing: {policy: least_kv, hold_s: 0}", "routing.hold_s: least_kv does not have this knob; target_fit, level_"),
    ("pool: {ttl_s: 480}", "pool.ttl_s = 480: accepted is less than the 480 s after which a mooncake_v1"),
    (
        "connector: nixl\npool: {ttl_s: 60}",
        "pool.ttl_s = 60: accepted is less than the 30 s after which a nixl",
    ),
    ("pool: {ttl_s: 0}", "pool.ttl_s = 0: accepted is a number, more than 0"),
    ("retry: {base_delay_s: 5, max_delay_s: 2}", "retry.max_delay_s = 2: accepted is at least retry.base_delay_s (5)"),
    ('listen: {host: "\\0"}', "listen.host = '\\x00': accepted is a host name or an IP address"),
    ("listen: {host: router..example}", "listen.host = 'router..example': accepted is a host name of parts of 1 to 63"),
    ("listen: {admin: '9999'}", "listen.admin = '9999': accepted is HOST:PORT, such as 127.0.0.1:8001"),
    ("listen: {admin: 'router..example:1'}", "listen.admin = 'router..example:1': accepted is a host name of parts"),
    ("log: {format: xml}", "log.format = 'xml': accepted is one of auto, json, plain"),
    (
        "auth: {admin_token: '${TOKEN}'}",
        "auth.admin_token = ********: a variable is not replaced here; set BALANCEROUTE",
    ),
    ("auth: {worker_api_key: $KEY}", "auth.worker_api_key = ********: a variable is not replaced here"),
    ("listen: {run_folder: ~/run, relays: 1}", "listen.run_folder = '~/run': ~ and variables are not replaced here"),
    ("listen: {port: 010000}", "listen.port = '010000': accepted is an integer"),
    ("auth: {admin_token: 12345}", "auth.admin_token = ********: accepted is text"),
    ("auth: 12345", "auth = ********: accepted is a mapping with the keys worker_api_key"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=[expected.split(":")[0] for _, expected in WRONG])
def test_a_wrong_value_is_reported_in_one_line_with_its_key_and_what_is_accepted(
    tmp_path: Path, text: str, expected: str
) -> None:
    message = refusal(tmp_path, WORKERS + text + "\n")
    assert f"c.yaml: {expected}" in message
    assert "\n" not in message


def test_a_wrong_value_of_a_setting_of_two_types_is_one_line_with_both() -> None:
    workers = {"prefill.workers": [{"url": "http://p:1"}], "decode.workers": [{"url": "http://d:1"}]}
    with pytest.raises(ConfigError) as refused:
        load(None, {}, workers | {"decode.overlap_requests": "some"})
    expected = "decode.overlap_requests = 'some': accepted is an integer, 0 to 65536 or auto"
    assert refused.value.problems == (f"command line: {expected}",)


PATHS = [setting.path for setting in describe_settings() if setting.path.endswith(("_file", "_folder"))]
PATHS += ["auth.client_keys", "listen.service_account", "predictor.history", "predictor.model"]


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    "text",
    ["\0", "-----BEGIN PRIVATE KEY-----\nMIIE\n", "a" * 256, "a/" * 3000],
    ids=["zero byte", "content of a file", "long name", "long path"],
)
def test_a_value_that_can_be_no_path_is_refused_before_it_is_opened(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(
            None, {}, {"prefill.workers": [{"url": "http://p:1"}], "decode.workers": [{"url": "http://d:1"}], key: text}
        )
    assert f"{key} = " in str(refused.value)
    assert "accepted is a path" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


WRONG_WORKERS = [
    (
        "[]",
        "decode.workers = []: accepted is a list of {url, id, dp_rank, max_num_seqs, slowdown, barrier_group},"
        " at least one",
    ),
    ("http://d:1", "decode.workers = 'http://d:1': accepted is a list of {url"),
    ("[http://d:1]", "decode.workers[0] = 'http://d:1': accepted is {url, id,"),
    ("[{id: a}]", "decode.workers[0].url: required and missing"),
    ("[{url: d:1}]", "decode.workers[0].url = 'd:1': accepted is http://HOST:PORT"),
    ("[{url: 'http://d:99999'}]", "decode.workers[0].url = 'http://d:99999': accepted is http://HOST:PORT"),
    ("[{url: 'http://::1:80'}]", "decode.workers[0].url = 'http://::1:80': accepted is http://HOST:PORT"),
    ("[{url: 'http://me:pw@d:1'}]", "decode.workers[0].url = 'http://********@d:1': accepted is http://HOST"),
    ("[{url: 'http://d:1?x=1'}]", "decode.workers[0].url = 'http://d:1?x=1': accepted is http://HOST:PORT"),
    ("[{url: 'http://d:1', slowdown: 0}]", "decode.workers[0].slowdown = 0: accepted is a number, more than 0"),
    (
        "[{url: 'http://d:1', rank: 0}]",
        "decode.workers[0].rank: unknown key; did you mean decode.workers[0].dp_rank?",
    ),
    ("[{url: 'http://d:1', host: d}]", "decode.workers[0].host: unknown key; accepted are url, id, dp_rank"),
    ("[{url: 'http://d:1', id: 'a b'}]", "decode.workers[0].id = 'a b': accepted are 1 to 128 letters"),
    (
        "[{url: 'http://d:1'}, {url: 'http://D:1/'}]",
        "decode.workers[1] = 'http://d:1': duplicate of decode.workers[0]",
    ),
    (
        "[{url: 'http://127.0.0.1:1'}, {url: 'http://localhost:1'}]",
        "decode.workers[1] = 'http://localhost:1': duplicate of decode.workers[0]",
    ),
    (
        "[{url: 'http://localhost:8000'}]",
        "decode.workers[0] = 'http://localhost:8000': this is the router's own address",
    ),
    ("[{url: 'http://127.1:8000'}]", "decode.workers[0] = 'http://127.0.0.1:8000': this is the router's own address"),
    ("[{url: 'http://0.0.0.0:8000'}]", "decode.workers[0] = 'http://0.0.0.0:8000': this is the router's own address"),
    ("[{url: 'http://p:1'}]", "decode.workers[0] = 'http://p:1': duplicate of prefill.workers[0]"),
    (
        "[{url: 'http://d:1', id: x}, {url: 'http://d:2', id: x}]",
        "decode.workers[1].id = 'x': already the id of",
    ),
    (
        "[{url: 'http://d:1'}, {url: 'http://d:1', dp_rank: 1}]",
        "decode.workers[1] = 'http://d:1': decode.workers[0]",
    ),
]


@pytest.mark.parametrize(("workers", "expected"), WRONG_WORKERS)
def test_a_wrong_worker_is_named_by_its_place_in_the_list(tmp_path: Path, workers: str, expected: str) -> None:
    text = f"prefill: {{workers: [{{url: http://p:1}}]}}\ndecode: {{workers: {workers}}}\n"
    message = refusal(tmp_path, text)
    assert f"c.yaml: {expected}" in message
    assert "\n" not in message


def test_a_router_on_all_addresses_refuses_itself_as_a_worker_but_accepts_its_port_elsewhere(
    tmp_path: Path,
) -> None:
    listen = "listen: {host: '::', port: 9000}\nprefill: {workers: [{url: http://10.0.0.1:9000}]}\n"
    for own in ("[::1]", "[::]", "0.0.0.0", "127.0.0.1", "localhost"):
        message = refusal(tmp_path, f"{listen}decode: {{workers: [{{url: 'http://{own}:9000'}}]}}\n")
        assert message.count("own address") == 1 and "decode.workers[0]" in message


def test_the_operators_listener_is_no_worker_either(tmp_path: Path) -> None:
    text = "listen: {admin: '127.0.0.1:8001'}\nprefill: {workers: [{url: http://localhost:8001}]}\n"
    message = refusal(tmp_path, f"{text}decode: {{workers: [{{url: 'http://10.0.0.1:8001'}}]}}\n")
    assert message.count("own address") == 1 and "prefill.workers[0]" in message


WRONG_FILES = [
    ("", "c.yaml: is empty"),
    ("# only a comment\n", "c.yaml: is empty"),
    ("- a\n- b\n", "c.yaml: is a list; accepted is a mapping"),
    ("routing:\n  policy: [br_0\n", "c.yaml: line 3, column 1: not valid YAML"),
    ("hello\n", "c.yaml: is a single value; accepted is a mapping"),
    ("routing:\n\tpolicy: br_0\n", "that cannot start any token; indent with spaces, not with tabs"),
    (
        "pool:\n max_entries: 3\n  ttl_s: 4\n",
        "c.yaml: line 3, column 8: not valid YAML: mapping values are not allowed",
    ),
    (
        "listen: {port: 1, port: 2}\n",
        "c.yaml: line 1, column 19: not valid YAML: the key port is given twice",
    ),
    ("listen: {port: 1}\n---\nlog: {}\n", "found another document; accepted is one, without a line ---"),
    ("1: x\n", "c.yaml: line 1, column 1: not valid YAML: the key 1 is not text"),
    ("routing: !!python/object:os.system {}\n", "c.yaml: line 1, column 10: not valid YAML"),
    ("log: {level: 2024-13-45}\n", "c.yaml: line 1, column 14: not valid YAML: it is no timestamp"),
    ("listen: {port: 80}\n", "c.yaml: prefill.workers: required and missing; accepted is a list of"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES)
def test_a_file_that_is_not_a_configuration_says_so(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert expected in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"listen: {host: caf\xe9}\n")
    with pytest.raises(ConfigError, match=r"latin.yaml: is not UTF-8 text \(byte 18\)"):
        load(tmp_path / "latin.yaml")


def test_without_a_file_the_error_names_the_sufficient_flags() -> None:
    with pytest.raises(ConfigError, match="or the flags --prefiller-hosts and --prefiller-ports"):
        load(None)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (
            "BALANCEROUTE_ROUTING__GAMA",
            "1",
            "BALANCEROUTE_ROUTING__GAMA: routing.gama: unknown key; did you mean",
        ),
        (
            "BALANCEROUTE_ROUTING__GAMMA",
            "2",
            "BALANCEROUTE_ROUTING__GAMMA: routing.gamma = 2: accepted is a number",
        ),
        (
            "BALANCEROUTE_ROUTING__R_MAX",
            "[1",
            "BALANCEROUTE_ROUTING__R_MAX: routing.r_max = '[1': accepted is an int",
        ),
        (
            "BALANCEROUTE_ROUTING__R_MAX",
            "",
            "BALANCEROUTE_ROUTING__R_MAX: routing.r_max = null: accepted is an int",
        ),
        (
            "BALANCEROUTE_ROUTING",
            "br_0",
            "BALANCEROUTE_ROUTING: routing is a section; accepted is BALANCEROUTE_ROUTING__",
        ),
        (
            "BALANCEROUTE_LISTEN__PORT__X",
            "1",
            "BALANCEROUTE_LISTEN__PORT__X: listen.port.x: port is not a section",
        ),
        (
            "BALANCEROUTE_LISTN__PORT",
            "1",
            "BALANCEROUTE_LISTN__PORT: listn: unknown key; did you mean listen?",
        ),
        (
            "BALANCEROUTE_LIMITS__PRIORITY__MIN",
            "20",
            "BALANCEROUTE_LIMITS__PRIORITY__MIN: limits.priority = {'min': 20}: accepted is a min that is not above",
        ),
        (
            "BALANCEROUTE_POOL__TTL_S",
            "500",
            "BALANCEROUTE_POOL__TTL_S: pool.ttl_s = 500: accepted is less than",
        ),
    ],
)
def test_a_wrong_variable_is_named_as_the_source(tmp_path: Path, variable: str, value: str, expected: str) -> None:
    message = refusal(tmp_path, WORKERS + "listen: {port: 1}\n", **{variable: value})
    assert message.startswith(expected)
    assert "\n" not in message


def test_a_wrong_flag_is_named_as_the_source(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(WORKERS)
    with pytest.raises(ConfigError, match=r"^command line: routing.r_max = 99: accepted is an integer, 1 to 64$"):
        load(tmp_path / "c.yaml", {}, {"routing.r_max": 99})


def test_several_problems_are_reported_in_one_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, WORKERS + "routing: {r_max: 0, gamma: 9, policy: x}\n")
    assert message.endswith("(and 2 more)")


def test_config_error_lists_every_problem_of_file_and_variables(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("prefill: {workers: [{url: http://p/v1}]}\ndecode: {workers: [{url: http://d}]}\npool: {ttl: 3}\n")
    environ = {"BALANCEROUTE_DECODE": "x", "BALANCEROUTE_ROUTING__R_MAX": "99"}
    with pytest.raises(ConfigError) as caught:
        load(path, environ)
    keys = [problem.split(":")[0] + ":" + problem.split(":")[1] for problem in caught.value.problems]
    assert {text.partition(" =")[0] for text in keys} == {
        "BALANCEROUTE_DECODE: decode is a section; accepted is BALANCEROUTE_DECODE__KEY for one of its keys",
        "BALANCEROUTE_ROUTING__R_MAX: routing.r_max",
        f"{path}: pool.ttl",
        f"{path}: prefill.workers[0].url",
    }


def test_every_broken_rule_between_settings_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(WORKERS + "pool: {ttl_s: 1000}\nretry: {max_delay_s: 0.01}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        f"{path}: pool.ttl_s",
        f"{path}: retry.max_delay_s",
    ]


def test_variables_that_look_like_settings_are_named_and_those_of_kubernetes_are_not() -> None:
    environ = {
        "BALANCEROUTE_POLICY": "br_0",
        "BALANCEROUTE_PORT": "tcp://10.0.0.1:8000",
        "BALANCEROUTE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "BALANCEROUTE_SERVICE_HOST": "10.0.0.1",
        "BALANCEROUTE_SERVICE_PORT_HTTP": "8000",
        "BALANCEROUTE_STEP_LOG": "/x",
        "BALANCEROUTE_ROUTING__R_MAX": "4",
        "BALANCEROUTE_CONNECTOR": "nixl",
        "BALANCEROUTE_NONSENSE": "1",
        "HOME": "/root",
    }
    assert [text.split(": ")[0] for text in unused_variables(environ)] == [
        "BALANCEROUTE_NONSENSE",
        "BALANCEROUTE_POLICY",
    ]
    (text,) = unused_variables({"BALANCEROUTE_PORT": "8123"})
    assert text.endswith("did you mean BALANCEROUTE_LISTEN__PORT?")


@pytest.mark.parametrize(
    ("decode", "lines"),
    [
        ("{workers: [{url: http://d:1}]}", 1),
        ("{workers: [{url: http://d:1, max_num_seqs: 8}, {url: http://d:2}]}", 1),
        ("{workers: [{url: http://d:1, max_num_seqs: 8}]}", 0),
        ("{workers: [{url: http://d:1}], max_num_seqs: 64}", 0),
    ],
)
def test_assumed_slots_are_reported(tmp_path: Path, decode: str, lines: int) -> None:
    config = from_yaml(tmp_path, f"prefill: {{workers: [{{url: http://p:1}}]}}\ndecode: {decode}\n")
    assert len([line for line in assumptions(config) if "decode.max_num_seqs" in line]) == lines


@pytest.mark.parametrize("name", ["max_wait_s", "hold_s"])
@pytest.mark.parametrize("written", [".inf", "inf", ".Inf", '"inf"'])
def test_an_infinite_time_is_accepted_and_printed_in_a_form_that_can_be_read_again(
    tmp_path: Path, name: str, written: str
) -> None:
    config = from_yaml(tmp_path, WORKERS + f"routing: {{{name}: {written}}}\n")
    assert getattr(policy_settings(config), name) == math.inf
    for shown in (effective_yaml(config), effective_json(config)):
        assert getattr(from_yaml(tmp_path, shown).routing, name) == math.inf


@pytest.mark.parametrize("written", ["inf", ".inf"])
def test_an_infinite_time_can_be_written_as_a_string(tmp_path: Path, written: str) -> None:
    assert from_yaml(tmp_path, WORKERS, BALANCEROUTE_ROUTING__MAX_WAIT_S=written).max_wait_s == math.inf


@pytest.mark.parametrize("written", ["-.inf", ".nan", "86401", "-1", "forever"])
def test_an_invalid_time_is_refused_with_what_is_accepted(tmp_path: Path, written: str) -> None:
    message = refusal(tmp_path, WORKERS + f"routing: {{max_wait_s: {written}}}\n")
    assert "routing.max_wait_s = " in message and "accepted is a number, 0 to 86400, or .inf" in message


def test_bounds_of_priority_that_cross_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, WORKERS + "limits: {priority: {min: 3, max: 2}}\n")
    assert "limits.priority" in message and "accepted is a min that is not above max, not 3 and 2" in message


def test_knobs_in_the_file_belong_to_its_own_policy_when_a_flag_chooses_another(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(WORKERS + "routing: {policy: br_h, beta: 43, horizon_steps: auto}\n")
    for policy in sorted(POLICIES):
        assert load(path, {}, {"routing.policy": policy}).routing.policy == policy
        assert load(path, {"BALANCEROUTE_ROUTING__POLICY": policy}).routing.policy == policy
    with pytest.raises(ConfigError, match=r"^command line: routing.gamma: least_kv does not have this knob; br_h has"):
        load(path, {}, {"routing.policy": "least_kv", "routing.gamma": 0.5})
    with pytest.raises(ConfigError, match=r"^BALANCEROUTE_ROUTING__SEED: routing.seed: br_h does not have this knob"):
        load(path, {"BALANCEROUTE_ROUTING__SEED": "1"})
    path.write_text(WORKERS + "routing: {policy: br_0, gamma: 0.5}\n")
    with pytest.raises(ConfigError, match=r"c.yaml: routing.gamma: least_kv does not have this knob"):
        load(path, {}, {"routing.policy": "least_kv"})
    assert load(path, {}, {"routing.policy": "br_h"}).routing.gamma == 0.5


def test_horizon_auto_follows_the_answer_lengths(tmp_path: Path) -> None:
    routing = from_yaml(tmp_path, WORKERS + "routing: {policy: br_h, horizon_steps: auto}\n").routing
    assert (routing.horizon_steps, routing.horizon_auto) == (80, True)
    with pytest.raises(ConfigError, match=r"routing\.horizon_steps"):
        from_yaml(tmp_path, WORKERS + "routing: {horizon_steps: long}\n")


def test_an_overlap_is_a_number_or_auto_and_never_decode_first(tmp_path: Path) -> None:
    assert scheduler_config(from_yaml(tmp_path, WORKERS)).overlap_requests is None
    for given, requests in (("3", 3), ("auto", None)):
        config = from_yaml(tmp_path, WORKERS.replace("decode: {", f"decode: {{overlap_requests: {given}, "))
        assert scheduler_config(config).overlap_requests == requests
    for wrong in ("-1", "65537", "some", "1.5"):
        with pytest.raises(ConfigError, match=r"decode\.overlap_requests"):
            from_yaml(tmp_path, WORKERS.replace("decode: {", f"decode: {{overlap_requests: {wrong}, "))
    layerwise = "connector: mooncake_layerwise\nlayerwise: {callback_url: 'http://10.0.0.5:8000'}\n"
    with pytest.raises(ConfigError, match="only where prefill comes first"):
        from_yaml(tmp_path, layerwise + WORKERS.replace("decode: {", "decode: {overlap_requests: 1, "))
    assert scheduler_config(from_yaml(tmp_path, layerwise + WORKERS)).overlap_requests == 0
