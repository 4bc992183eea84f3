"""`auth`, `tls` and `metrics`: who may use which routes, and the certificates."""

from pydantic import Field

from balanceroute.config.sections.section import Section
from balanceroute.config.values import FilePath, Origin, Secret


class Auth(Section):
    """Secrets; they are masked wherever the configuration is shown."""

    worker_api_key: Secret | None = Field(
        None,
        description="Sent to workers as Authorization: Bearer, in place of the client's own. Unset: OPENAI_API_KEY of "
        "the environment; without that the client's Authorization unchanged, or none with auth.client_keys.",
    )
    client_keys: FilePath | None = Field(
        None,
        description="File of client keys as SHA-256 hashes (`balanceroute key` makes entries); then requests of "
        "clients need one. Unset: whoever can connect may use the cluster.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        strict=False,
        description="Origins whose web pages may use the client routes (CORS), such as https://chat.example.com; `*` "
        "is every page, as with vLLM. Empty: pages of other sites are refused.",
    )
    admin_token: Secret | None = Field(
        None,
        description="Bearer token of the admin routes (/instances, /state, /decisions, /dashboard, /routing/policy, "
        "/reset_prefix_cache, profiling). Unset: they are open to the router's own machine only, at 127.0.0.1; where "
        "listen.host is another address, set listen.admin to 127.0.0.1:PORT for them.",
    )


class TlsFiles(Section):
    """Certificates, as PEM files; read again when they change and on SIGHUP."""

    cert_file: FilePath | None = Field(None, description="Certificate (chain) that clients see. Unset: plain HTTP.")
    key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in cert_file.")
    client_ca_file: FilePath | None = Field(
        None,
        description="CA of the clients' certificates: every client must show one, on every route. Unset: none is "
        "required.",
    )
    worker_ca_file: FilePath | None = Field(
        None, description="CA of the workers' certificates (https URLs). Unset: the system's."
    )
    worker_cert_file: FilePath | None = Field(
        None, description="Certificate that the router shows to https workers. Unset: none."
    )
    worker_key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in worker_cert_file.")
    link_ca_file: FilePath | None = Field(
        None,
        description="CA of the link between machines, of nothing else: whoever has a certificate of it is one of the "
        "router's own processes. Needed with listen.link and listen.brains.",
    )
    link_cert_file: FilePath | None = Field(
        None,
        description="Certificate (chain) of this machine on the link; a brain's names the host of listen.brains.",
    )
    link_key_file: FilePath | None = Field(None, description="Its private key. Unset: it is in link_cert_file.")


class MetricsPage(Section):
    """Who may read `/metrics`, and so learn how workers are called."""

    public: bool = Field(
        True,
        description="false: /metrics is an admin route (auth.admin_token), and /ready names workers to operators only.",
    )
