"""The gateways: how each is configured, started, and known to be ready."""

import base64
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from bridge import descriptor_set


@dataclass
class Place:
    """What all of them share: where things are, what the stand printed, and how many threads each gets."""

    bin: Path
    envoy: str
    dir: Path
    stand: dict
    routes: int
    workers: int


@dataclass
class Target:
    """A started gateway is `command`; without one, callers go to the backend itself."""

    name: str
    url: str
    command: list = field(default_factory=list)
    env: dict = field(default_factory=dict)
    ready: str = ""

    def is_ready(self) -> bool:
        if self.ready:
            try:
                return urllib.request.urlopen(self.ready, timeout=1).status == 200
            except (urllib.error.URLError, OSError):
                return False
        host, port = self.url.split("//")[1].split(":")
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kruntimes(place: Place) -> Target:
    """As the chart starts it."""
    port, admin = free_port(), free_port()
    command = [
        place.bin / "kruntimes-gateway",
        f"--listen=127.0.0.1:{port}",
        f"--admin-address=127.0.0.1:{admin}",
        f"--tls-dir={place.dir / 'tls'}",
        f"--peer-dir={place.dir / 'peer'}",
        f"--threads={place.workers}",
        "--allow-local-owners",
        "--shutdown-delay=0s",
        "--grace-period=5s",
    ]
    env = {"KUBECONFIG": str(place.dir / "kubeconfig")}
    return Target("kruntimes", f"https://127.0.0.1:{port}", command, env, f"http://127.0.0.1:{admin}/readyz")


def plain(place: Place) -> Target:
    port = free_port()
    command = [
        place.bin / "kruntimes-bench-stand",
        "plain",
        f"--listen=127.0.0.1:{port}",
        f"--dir={place.dir}",
        f"--owner={place.stand['owner']}",
        f"--owner-key={place.stand['owner_key']}",
        f"--routes={place.routes}",
        f"--threads={place.workers}",
    ]
    return Target("plain", f"https://127.0.0.1:{port}", command)


def direct(place: Place) -> Target:
    return Target("direct", f"http://{place.stand['http_plaintext']}")


# === Envoy ===

TYPE = "type.googleapis.com/envoy.extensions."


def address(at: str) -> dict:
    host, port = at.split(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def certificate(place: Place, name: str) -> dict:
    pair = place.dir / name
    return {
        "certificate_chain": {"filename": str(pair / "tls.crt")},
        "private_key": {"filename": str(pair / "tls.key")},
    }


def cluster(name: str, at: str, windows: dict, tls: dict) -> dict:
    """A backend that speaks HTTP/2."""
    protocol = TYPE + "upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": 4 << 20,
        "circuit_breakers": {"thresholds": [{"max_connections": 1024, "max_pending_requests": 4096, "max_requests": 4096}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": protocol,
                "explicit_http_config": {"http2_protocol_options": windows},
            }
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(at)}}]}],
        },
        **tls,
    }


def envoy_filters(authz: bool) -> list:
    filters = [
        {
            "name": "envoy.filters.http.grpc_json_transcoder",
            "typed_config": {
                "@type": TYPE + "filters.http.grpc_json_transcoder.v3.GrpcJsonTranscoder",
                "proto_descriptor_bin": base64.b64encode(descriptor_set()).decode(),
                "services": ["bench.v1.Bridge"],
                "convert_grpc_status": True,
                "max_request_body_size": 2 << 20,
                "max_response_body_size": 2 << 20,
            },
        },
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": TYPE + "filters.http.router.v3.Router"},
        },
    ]
    if authz:
        question = {
            "@type": TYPE + "filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": "authorizer"}, "timeout": "1s"},
        }
        filters.insert(0, {"name": "envoy.filters.http.ext_authz", "typed_config": question})
    return filters


def envoy_config(place: Place, name: str, port: int, authz: bool, mtls: bool) -> dict:
    windows = {"initial_stream_window_size": 2 << 20, "initial_connection_window_size": 16 << 20}
    versions = {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"}
    serving = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": TYPE + "transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "tls_params": versions,
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_certificates": [certificate(place, "tls")],
            },
        },
    }
    # The same check as ours: exactly the owner's key.
    pin = base64.b64encode(bytes.fromhex(place.stand["owner_key"])).decode()
    hop = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": TYPE + "transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {
                "tls_params": versions,
                "alpn_protocols": ["h2"],
                "tls_certificates": [certificate(place, "peer")],
                "validation_context": {"verify_certificate_spki": [pin]},
            },
        },
    }
    log = {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": TYPE + "access_loggers.file.v3.FileAccessLog",
            "path": str(place.dir / f"{name}.access"),
        },
    }
    manager = {
        "@type": TYPE + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "codec_type": "AUTO",
        "generate_request_id": False,
        "access_log": [log],
        "http2_protocol_options": {
            "initial_stream_window_size": 1 << 20,
            "initial_connection_window_size": 4 << 20,
            "max_concurrent_streams": 256,
        },
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "owner", "timeout": "30s"}}],
                }
            ]
        },
        "http_filters": envoy_filters(authz),
    }
    owner = place.stand["owner" if mtls else "owner_plaintext"]
    clusters = [cluster("owner", owner, windows, {"transport_socket": hop} if mtls else {})]
    if authz:
        clusters.append(cluster("authorizer", place.stand["authorizer"], {}, {}))
    listener = {
        "name": "https",
        "address": address(f"127.0.0.1:{port}"),
        "per_connection_buffer_limit_bytes": 4 << 20,
        "filter_chains": [
            {
                "transport_socket": serving,
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
            }
        ],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def envoy(place: Place, name: str, authz: bool = False, mtls: bool = True) -> Target:
    port = free_port()
    config = place.dir / f"{name}.json"
    config.write_text(json.dumps(envoy_config(place, name, port, authz, mtls)))
    command = [place.envoy, "-c", config, "--concurrency", place.workers, "-l", "warn", "--disable-hot-restart"]
    return Target(name, f"https://127.0.0.1:{port}", command)


# === nginx ===


def nginx(place: Place, name: str, mtls: bool = True) -> Target:
    port, home = free_port(), place.dir
    temporary = home / f"{name}.tmp"
    temporary.mkdir(exist_ok=True)
    hop = f"""
      proxy_ssl_certificate {home}/peer/tls.crt;
      proxy_ssl_certificate_key {home}/peer/tls.key;
      proxy_ssl_protocols TLSv1.3;
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate {home}/owner.crt;
      proxy_ssl_name kruntimes-runtimed;"""
    config = home / f"{name}.conf"
    config.write_text(f"""
{"user root;" if os.geteuid() == 0 else ""}
worker_processes {place.workers};
daemon off;
pid {temporary}/pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log {home}/{name}.access combined buffer=64k flush=1s;
  client_body_temp_path {temporary}/body;
  proxy_temp_path {temporary}/proxy;
  fastcgi_temp_path {temporary}/fastcgi;
  uwsgi_temp_path {temporary}/uwsgi;
  scgi_temp_path {temporary}/scgi;
  client_max_body_size 2m;
  client_body_buffer_size 1100k;
  proxy_buffers 16 128k;
  proxy_buffer_size 128k;
  proxy_busy_buffers_size 256k;
  keepalive_requests 100000000;
  upstream owner {{
    server {place.stand["http" if mtls else "http_plaintext"]};
    keepalive 256;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {home}/tls/tls.crt;
    ssl_certificate_key {home}/tls/tls.key;
    ssl_protocols TLSv1.3;
    location / {{
      proxy_pass {"https" if mtls else "http"}://owner;
      proxy_http_version 1.1;
      proxy_set_header Connection "";{hop if mtls else ""}
    }}
  }}
}}
""")
    # Debian keeps it where only root's PATH looks.
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin") or "nginx"
    return Target(name, f"https://127.0.0.1:{port}", [program, "-e", "stderr", "-c", config])


ALL = {
    "kruntimes": kruntimes,
    "envoy": lambda place: envoy(place, "envoy"),
    "envoy-authz": lambda place: envoy(place, "envoy-authz", authz=True),
    "nginx": lambda place: nginx(place, "nginx"),
    "plain": plain,
    "envoy-plaintext": lambda place: envoy(place, "envoy-plaintext", mtls=False),
    "nginx-plaintext": lambda place: nginx(place, "nginx-plaintext", mtls=False),
    "direct": direct,
}
