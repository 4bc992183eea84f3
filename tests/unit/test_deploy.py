"""The deployment files: they parse, agree with `configs/`, and the launch script watches over its servers."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from balanceroute.config import Config, load
from balanceroute.errors import AccessDenied
from balanceroute.proxy.link.leadership import FileLead
from balanceroute.proxy.link.lease import LeaseLead
from balanceroute.proxy.ops.to_brain import OPEN_S
from balanceroute.proxy.parent.supervisor import KILL_S
from balanceroute.proxy.perimeter.access import AdminGate, Visit
from balanceroute.proxy.run_folder.folder import RunFolder
from tests.api_server import an_api_server
from tests.waiting import PATIENCE_S, block_until

ROOT = Path(__file__).parents[2]
ASCEND = ROOT / "deploy" / "vllm-ascend"
START = ASCEND / "start_node.sh"
TOPOLOGIES = ["2p1d", "4p1d", "5p1d"]


def config_of(topology: str) -> Config:
    return load(ROOT / "configs" / f"{topology}.yaml", {})


def dry_run(topology: str, role: str, index: int, **environ: str) -> list[list[str]]:
    done = subprocess.run(
        ["bash", START, "--dry-run", topology, role, str(index)],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


@cache
def all_servers(topology: str, role: str) -> list[list[str]]:
    """The commands of all machines of a role, in the order of their indices."""
    commands: list[list[str]] = []
    index = 0
    while True:
        try:
            commands += dry_run(topology, role, index)
        except subprocess.CalledProcessError as error:
            assert "so INDEX is 0 to" in error.stderr
            return commands
        index += 1


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def variables(command: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in command[1 : command.index("vllm")])


def transfer(command: list[str]) -> dict[str, Any]:
    return dict(json.loads(flag(command, "--kv-transfer-config")))


@pytest.mark.parametrize("path", sorted(ASCEND.rglob("*.sh")), ids=lambda path: path.name)
def test_a_script_parses(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_scripts_start_exactly_the_servers_of_the_configuration(topology: str, role: str) -> None:
    started = [
        f"http://{variables(command)['HCCL_IF_IP']}:{flag(command, '--port')}"
        for command in all_servers(topology, role)
    ]
    config = config_of(topology)
    workers = config.prefill.workers if role == "prefill" else config.decode.workers
    assert started == [worker.url for worker in workers]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_decode_ranks_are_numbered_through_and_share_one_group(topology: str) -> None:
    commands = all_servers(topology, "decode")
    assert [int(flag(c, "--data-parallel-rank")) for c in commands] == list(range(len(commands)))
    assert {flag(c, "--data-parallel-size") for c in commands} == {str(len(commands))}
    assert {flag(c, "--data-parallel-address") for c in commands} == {variables(commands[0])["HCCL_IF_IP"]}
    assert {(transfer(c)["kv_role"], transfer(c)["engine_id"]) for c in commands} == {("kv_consumer", topology[0])}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_prefill_machine_is_a_group_with_its_own_engine_and_kv_port(topology: str) -> None:
    commands = all_servers(topology, "prefill")
    groups = {(transfer(c)["engine_id"], transfer(c)["kv_port"]) for c in commands}
    assert len(groups) == int(topology[0])
    assert len({port for _, port in groups}) == len(groups)
    assert {transfer(c)["kv_role"] for c in commands} == {"kv_producer"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kv_ports_of_groups_do_not_touch_and_stay_above_the_transports_range(topology: str) -> None:
    used: dict[int, str] = {}
    for command in all_servers(topology, "prefill") + all_servers(topology, "decode"):
        config, tp = transfer(command), int(flag(command, "--tensor-parallel-size"))
        first = int(config["kv_port"]) + int(flag(command, "--data-parallel-rank")) * tp
        for port in range(first, first + tp):
            assert port >= 36000
            assert used.setdefault(port, config["engine_id"]) == config["engine_id"]
    assert max(used) <= 36563  # the range that the README tells to open


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_limits_agree_between_scripts_and_configuration(topology: str) -> None:
    config = config_of(topology)
    decoders, prefillers = all_servers(topology, "decode"), all_servers(topology, "prefill")
    assert {int(flag(c, "--max-num-seqs")) for c in decoders} == {config.decode.max_num_seqs}
    pins = {float(variables(c)["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"]) for c in prefillers}
    assert pins == {config.kv_pin_s}
    assert config.connector == "mooncake_v1"
    assert {transfer(c)["kv_connector"] for c in decoders + prefillers} == {"MooncakeConnectorV1"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_rank_has_its_own_devices(topology: str) -> None:
    for role in ("prefill", "decode"):
        devices = [variables(c)["ASCEND_RT_VISIBLE_DEVICES"].split(",") for c in dry_run(topology, role, 0)]
        assert sorted(int(d) for rank in devices for d in rank) == list(range(16))


def test_only_decoders_recompute() -> None:
    (decoder, *_), (prefiller, *_) = dry_run("2p1d", "decode", 0), dry_run("2p1d", "prefill", 0)
    assert json.loads(flag(decoder, "--additional-config"))["scheduler_config"]["recompute_scheduler_enable"]
    assert "--additional-config" not in prefiller


def test_further_flags_come_last() -> None:
    command = dry_run("2p1d", "decode", 0, DECODE_EXTRA="--max-model-len 8192")[0]
    assert command[-2:] == ["--max-model-len", "8192"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["9p9d", "decode", "0"], "no topology 9p9d; there are: 2p1d 4p1d 5p1d"),
        (["2p1d", "both", "0"], "role both is neither prefill nor decode"),
        (["2p1d", "decode", "1"], "2p1d has 1 decode machines, so INDEX is 0 to 0"),
        (["2p1d", "decode", "x"], "INDEX x is not a number"),
        (["2p1d"], "usage: "),
        (["2p1d", "decode", "0"], "set MODEL to the path of the weights"),
    ],
)
def test_a_wrong_call_is_reported_in_one_line(arguments: list[str], expected: str) -> None:
    done = subprocess.run(["bash", START, *arguments], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"start_node.sh: {expected}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "usage: wait_ready.sh TOPOLOGY [SECONDS]"),
        (["--help"], "usage: wait_ready.sh TOPOLOGY [SECONDS]"),
        (["2p1d", "soon"], "usage: wait_ready.sh TOPOLOGY [SECONDS]"),
        (["9p9d"], "wait_ready.sh: no topology 9p9d; there are: 2p1d 4p1d 5p1d"),
    ],
)
def test_waiting_for_what_cannot_be_is_refused_in_one_line(arguments: list[str], expected: str) -> None:
    done = subprocess.run(["bash", START.with_name("wait_ready.sh"), *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"{expected}\n")


def test_when_one_server_ends_the_others_of_the_machine_are_stopped(tmp_path: Path) -> None:
    stand_in = tmp_path / "bin" / "vllm"
    stand_in.parent.mkdir()
    # the rank on port 9002 dies once all four are there; the others note that they were told to stop
    stand_in.write_text(
        "#!/bin/bash\n"
        'while [[ $1 != --port ]]; do shift; done; touch "$OUT/$2.up"\n'
        "if [[ $2 == 9002 ]]; then\n"
        "  until [[ -e $OUT/9000.ready && -e $OUT/9001.ready && -e $OUT/9003.ready ]]; do sleep 0.02; done\n"
        "  exit 1\n"
        "fi\n"
        "trap 'touch \"$OUT/'$2'.stopped\"; exit 0' TERM\n"
        'touch "$OUT/$2.ready"\n'
        "while :; do sleep 0.02; done\n"
    )
    stand_in.chmod(0o755)
    environ = {
        "PATH": f"{stand_in.parent}:/usr/bin:/bin",
        "OUT": str(tmp_path),
        "MODEL": "/weights",
        "NIC": "lo",
        "LOG_DIR": str(tmp_path / "logs"),
    }
    done = subprocess.run(
        ["bash", START, "2p1d", "decode", "0"], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "a server ended" in done.stderr
    assert sorted(path.stem for path in tmp_path.glob("*.stopped")) == ["9000", "9001", "9003"]
    assert len(list((tmp_path / "logs").glob("decode-0-rank*.log"))) == 4


def test_the_compose_file_shares_one_network_and_publishes_on_loopback() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    services = compose["services"]
    assert services["router"]["network_mode"] == "service:cluster"
    assert services["cluster"]["ports"] == ["127.0.0.1:8000:8000"]
    assert services["cluster"]["volumes"] == services["router"]["volumes"]


def test_a_call_through_the_configured_balancer_is_never_admitted_as_loopback() -> None:
    lines = (ROOT / "deploy" / "haproxy.cfg").read_text().splitlines()
    assert "option forwardfor" in [line.strip() for line in lines]
    local = Visit("GET", [(b"host", b"localhost")], "127.0.0.1")
    assert AdminGate(None).admit(local, 0.0) == "loopback"
    with pytest.raises(AccessDenied):
        AdminGate(None).admit(replace(local, headers=[*local.headers, (b"x-forwarded-for", b"203.0.113.9")]), 0.0)


def test_the_configured_balancer_does_not_buffer_tokens() -> None:
    lines = (ROOT / "deploy" / "haproxy.cfg").read_text().splitlines()
    assert "option http-no-delay" in [line.strip() for line in lines]  # else it waits 0.2 s for more to send with it


def test_stopping_leaves_time_to_drain_and_to_kill_what_hangs() -> None:
    last_s = config_of("4p1d").lifecycle.drain_timeout_s + KILL_S
    unit = (ROOT / "deploy" / "balanceroute.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    assert stop is not None
    assert int(stop[1]) > last_s
    assert int(compose["services"]["router"]["stop_grace_period"].removesuffix("s")) > last_s


def test_the_systemd_unit_allows_numpys_memory_calls_and_denies_others_with_eperm() -> None:
    lines = (ROOT / "deploy" / "balanceroute.service").read_text().splitlines()
    filters = [line.removeprefix("SystemCallFilter=") for line in lines if line.startswith("SystemCallFilter=")]
    assert filters == ["@system-service", "~@privileged"]  # mbind, at numpy's import, and nice are in @resources
    assert "SystemCallErrorNumber=EPERM" in lines


def test_relays_accept_the_run_folder_of_the_systemd_unit() -> None:
    unit = (ROOT / "deploy" / "balanceroute.service").read_text()
    (made,) = re.findall(r"^RuntimeDirectory=(\S+)$", unit, re.MULTILINE)
    assert "DynamicUser=yes" in unit and "RuntimeDirectoryPreserve=restart" in unit
    (run_folder,) = re.findall(r"BALANCEROUTE_LISTEN__RUN_FOLDER=(\S+)", unit)
    with TemporaryDirectory(prefix="run-") as folder:  # as short as /run: the path of a socket has 107 bytes at most
        runtime = Path(folder)
        (runtime / "private" / made).mkdir(parents=True)
        (runtime / made).symlink_to(Path("private", made))  # of a dynamic user's folder that outlives a run
        RunFolder(Path(run_folder.replace("%t", folder))).make()


def test_systemd_does_not_repeat_a_start_that_the_configuration_prevents() -> None:
    lines = (ROOT / "deploy" / "balanceroute.service").read_text().splitlines()
    assert "RestartPreventExitStatus=2" in lines
    # which systemd applies to the main process alone (systemd issue 11868)
    assert not any(line.startswith("ExecStartPre=") for line in lines)


def test_systemd_gives_the_router_the_private_key_itself_so_that_a_renewed_one_is_found() -> None:
    unit = (ROOT / "deploy" / "balanceroute.service").read_text()
    assert "SupplementaryGroups=" in unit
    assert "LoadCredential=key" not in unit  # a credential does not change while a unit runs (systemd issue 21099)


def test_the_journal_takes_a_line_for_each_of_thousands_of_requests_per_second() -> None:
    unit = dict(re.findall(r"^(LogRateLimit\w+)=(\d+)s?$", (ROOT / "deploy/balanceroute.service").read_text(), re.M))
    burst, interval_s = int(unit["LogRateLimitBurst"]), int(unit["LogRateLimitIntervalSec"])
    assert burst / interval_s > 3000
    assert f"sets {burst:,}" in (ROOT / "docs/log.md").read_text()


def test_the_images_health_check_reaches_a_router_that_listens_on_ipv6_alone() -> None:
    assert "http://localhost:8000/health" in (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_image_runs_as_its_own_numeric_user() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    user = str(kubernetes("StatefulSet")["spec"]["template"]["spec"]["securityContext"]["runAsUser"])
    assert any(f"--uid {user} " in line for line in lines)
    assert lines.index(f"USER {user}") < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))


def test_prefillers_cache_prefixes_by_default_and_decode_workers_never_do() -> None:
    off = "--no-enable-prefix-caching"
    assert all("--enable-prefix-caching" in command for command in dry_run("2p1d", "prefill", 0))
    assert all(off in command for command in dry_run("2p1d", "prefill", 0, PREFIX_CACHING="off"))
    assert all(off in command for command in dry_run("2p1d", "decode", 0))


def kubernetes(kind: str) -> dict[str, Any]:
    """The only object of this kind in the manifest."""
    objects = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    (found,) = [each for each in objects if each["kind"] == kind]
    return dict(found)


def test_pods_of_the_manifest_have_a_configuration_that_loads_and_time_to_drain(tmp_path: Path) -> None:
    (tmp_path / "balanceroute.yaml").write_text(kubernetes("ConfigMap")["data"]["balanceroute.yaml"])
    config = load(tmp_path / "balanceroute.yaml", {})
    pod = kubernetes("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > config.lifecycle.drain_timeout_s + KILL_S
    assert container["ports"][0]["containerPort"] == config.listen.port
    assert int(container["resources"]["requests"]["cpu"]) == config.listen.relays + 1
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    run_folder = Path(str(config.listen.run_folder))
    assert str(run_folder) not in mounts  # a volume is root's, whatever the pod runs as
    assert volumes[mounts[str(run_folder.parent)]]["emptyDir"]["medium"] == "Memory"


def test_checks_of_readiness_wait_for_the_relays_own_answer() -> None:
    (container,) = kubernetes("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["timeoutSeconds"] > OPEN_S
    (balancer,) = re.findall(r"^ *timeout check (\d+)s$", (ROOT / "deploy/haproxy.cfg").read_text(), re.MULTILINE)
    assert int(balancer) > OPEN_S


def test_the_pods_service_account_has_exactly_the_needed_lease_rights(tmp_path: Path) -> None:
    with an_api_server(tmp_path) as server:
        lead = LeaseLead(FileLead(tmp_path / "lead"), server.api("balanceroute"), lambda: "a", 2)
        block_until(lead.take)
        block_until(lambda: ("PUT", 200) in server.calls)
        lead.release()
        verbs = {{"GET": "get", "POST": "create", "PUT": "update"}[method] for method, _ in server.calls}
    rules = kubernetes("Role")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == verbs == {"get", "create", "update"}
    assert all(rule["apiGroups"] == ["coordination.k8s.io"] and rule["resources"] == ["leases"] for rule in rules)
    assert [rule["verbs"] for rule in rules if "resourceNames" not in rule] == [["create"]]
    names = {name for rule in rules for name in rule.get("resourceNames", ())}
    assert names == {yaml.safe_load(kubernetes("ConfigMap")["data"]["balanceroute.yaml"])["listen"]["lease"]}
    assert kubernetes("RoleBinding")["subjects"][0]["name"] == kubernetes("ServiceAccount")["metadata"]["name"]
    assert kubernetes("StatefulSet")["spec"]["template"]["spec"]["serviceAccountName"] == "balanceroute"
