"""An OpenSSH server in each host, with keys of its own, so that plain `ssh h1` works from any host.

Servers and clients read the cluster's /etc/ssh; the machine's, and anybody's ~/.ssh, stay as they are. A session gets
what sshd gives: root's shell and a short PATH, nothing of the environment that the client has. With that SHLVL, bash
does not run ~/.bashrc, which on a developer's machine may take long, or wait for a lock that a killed session has left.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster import namespaces
from cluster.hosts import Cluster, Host
from cluster.namespaces import command, wait_until
from cluster.tools import find

# The folder to which sshd confines its unauthenticated part; Debian makes it when the machine starts.
PRIVILEGE_SEPARATION = Path("/run/sshd")
SERVER = """\
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized}
PidFile none
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv SHLVL=2
LogLevel VERBOSE
"""
CLIENT = """\
GlobalKnownHostsFile /etc/ssh/ssh_known_hosts
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
UpdateHostKeys no
IdentitiesOnly yes
PasswordAuthentication no
"""


def start(cluster: Cluster, *, port: int = 22, identity: bool = True) -> Path:
    """Start a server in every host, the launcher too, and wait until they listen.

    Args:
        cluster: The hosts.
        port: Where they listen.
        identity: Whether clients use the key without being told to, and know the port.

    Returns:
        The user's private key, which every server takes.
    """
    folder = cluster.folder / "ssh"
    folder.mkdir(mode=0o755)
    key = folder / "id_ed25519"
    _make_key(key)
    shutil.copy(f"{key}.pub", folder / "authorized_keys")
    known = []
    for host in cluster.machines:
        host_key = host.folder / "ssh_host_ed25519_key"
        _make_key(host_key)
        names = [host.name, "localhost"]
        for interface, addresses in host.addresses.items():
            names += [f"{host.name}-{interface}", *addresses]
        known += [f"{name} {Path(f'{host_key}.pub').read_text()}" for name in names]
        known += [f"[{name}]:{port} {Path(f'{host_key}.pub').read_text()}" for name in names]
        (namespaces.ETC / host.namespace / "ssh").symlink_to(folder)
    (folder / "ssh_known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(CLIENT + f"IdentityFile /etc/ssh/id_ed25519\nPort {port}\n" * identity)
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    for host in cluster.machines:
        _start_server(host, folder, port)
    for host in cluster.machines:
        wait_until(lambda host=host: "listening on :: port" in log(host), f"sshd on {host.name}")
    return key


def _make_key(path: Path) -> None:
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path)


def _start_server(host: Host, folder: Path, port: int) -> None:
    config = host.folder / "sshd_config"
    keys = {"host_key": host.folder / "ssh_host_ed25519_key", "authorized": folder / "authorized_keys"}
    config.write_text(SERVER.format(port=port, **keys))
    with (host.folder / "sshd.log").open("wb") as output:
        host.popen([find("sshd") or "sshd", "-D", "-e", "-f", config], stdout=output, stderr=output)


def log(host: Host) -> str:
    """Return the log of a host's server."""
    return (host.folder / "sshd.log").read_text(errors="replace").lower()


def sessions(host: Host) -> list[int]:
    """The server processes of the sessions on a host: a session's connection drops when they are killed."""
    return [pid for pid, words in host.processes().items() if words.startswith("sshd: root")]
