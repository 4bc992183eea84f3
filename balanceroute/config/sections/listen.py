"""`listen`: where clients reach the router, and of which processes it is made."""

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.values import FilePath, Host, HostAndPort, LeaseName, split_host_and_port


class Listen(Section):
    """Where clients reach the router."""

    host: Host = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0, or :: for IPv6 alone, to be reached from other machines.",
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 lets the system choose one.")
    admin: HostAndPort | None = Field(
        None,
        description="HOST:PORT of a second listener, for the admin routes alone; the clients' listener answers "
        "these with 404 then. Set it to give operators an address that clients cannot reach. Unset: all routes "
        "on one listener.",
    )
    relays: int = Field(
        0,
        ge=0,
        le=64,
        description="Processes that hold clients and their streams; one more decides, and one restarts those that die "
        "([several processes](relays.md)). 0: one process does everything, which is enough for 15,000 events per "
        "second.",
    )
    standbys: int = Field(
        1,
        ge=0,
        le=8,
        description="With listen.relays: standby brains (deciding processes). One of them takes the lead when the "
        "brain that decides dies or stops.",
    )
    link: HostAndPort | None = Field(
        None,
        description="With listen.relays: HOST:PORT at which the brain accepts relays of other machines, over "
        "TLS (tls.link_*). Unset: relays of this machine alone.",
    )
    brains: tuple[HostAndPort, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="With listen.relays, on a machine with only relays: HOST:PORT of the brain's listen.link; no "
        "brain runs on this machine then. Name several if brains of several machines elect a leader by listen.lease.",
    )
    lease: LeaseName | None = Field(
        None,
        description="With listen.relays, in a pod of Kubernetes: NAME or NAMESPACE/NAME of a Lease. Of all routers "
        "that name it only its holder decides and is ready; the others are standbys. Unset: each decides.",
    )
    lease_duration_s: int = Field(
        15,
        ge=2,
        le=3600,
        description="How long after its last renewal a Lease keeps other routers from leading; its holder steps "
        "down after two thirds of that. Lower: another pod leads sooner after one dies, and the API server gets "
        "more calls. The same for all routers.",
    )
    service_account: FilePath = Field(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        description="With listen.lease: the folder with the pod's token, ca.crt and namespace.",
    )
    run_folder: FilePath | None = Field(
        None,
        description="Folder, of mode 0700, in which the processes of listen.relays find each other and keep their "
        "records of pinned KV. Unset: balanceroute-PORT in XDG_RUNTIME_DIR, or without that balanceroute-UID-PORT in "
        "the system's temporary folder.",
    )

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of `admin`."""
        return None if self.admin is None else split_host_and_port(self.admin)

    @property
    def link_address(self) -> tuple[str, int] | None:
        """Host and port of `link`."""
        return None if self.link is None else split_host_and_port(self.link)

    @property
    def brain_addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of `brains`."""
        return [split_host_and_port(brain) for brain in self.brains]
