"""A container as a process of this machine: its command, its variables and its files, with the pod's address in the
place of 0.0.0.0, and folders of ours in the place of its volumes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_cli.local.redis import find_program
from tests.kubernetes.objects import contents
from tests.support.manifests import Object

Json = Mapping[str, Any]

ANYWHERE = "0.0.0.0"
REDIS = ("valkey-server", "redis-server")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_REDIS_HOST = re.compile(r"^(rediss?://(?:[^@/]*@)?)([^:/]+)")


@dataclass(frozen=True)
class Place:
    """Where a pod runs."""

    name: str
    address: str
    folder: Path
    """For its volumes and its log; gone with the pod."""
    claims: Path
    """For its volume claims; stays."""
    name_server_port: int
    stable_address: Callable[[str], str]
    """The address of a service that is dialled without gRPC."""


@dataclass(frozen=True)
class Start:
    """What is run."""

    command: list[str]
    variables: dict[str, str]


class Containers:
    """Makes the containers of one pod startable."""

    def __init__(self, spec: Json, place: Place, objects: Sequence[Object]) -> None:
        """`spec`: of the pod. Lays its volumes out."""
        self._place, self._objects = place, objects
        self._folders = {volume["name"]: self._volume(volume) for volume in spec.get("volumes", ())}

    def start_of(self, container: Json) -> Start:
        """How a container is started."""
        mounts = {mount["mountPath"]: self._folder(mount["name"]) for mount in container.get("volumeMounts", ())}
        for folder in mounts.values():
            self._move_files(folder, mounts)
        variables: dict[str, str] = {}
        for entry in container.get("env", ()):
            value = entry["value"] if "value" in entry else self._value_from(entry["valueFrom"])
            variables[entry["name"]] = self._moved(_expanded(value, variables), mounts)
        command = [*container.get("command", ()), *container.get("args", ())]
        command = [_with_folders(_expanded(word, variables), mounts) for word in command]
        if not command:
            raise ValueError(f"container {container['name']}: without an image there must be a command")
        if command[0] == "python":
            command[0] = sys.executable
        elif command[0] in REDIS:
            command = [find_program(), *command[1:], "--bind", self._place.address]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        return Start(command, inherited | variables)

    def _value_from(self, source: Json) -> str:
        for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
            if reference := source.get(key):
                return contents(self._objects, kind, reference["name"])[reference["key"]]
        path = source["fieldRef"]["fieldPath"]
        return {"status.podIP": self._place.address, "metadata.name": self._place.name}[path]

    def _moved(self, value: str, mounts: Mapping[str, Path]) -> str:
        """A variable's value, where this pod is."""
        value = value.replace(ANYWHERE, self._place.address)
        value = value.replace("dns:///", f"dns://127.0.0.1:{self._place.name_server_port}/")
        value = _REDIS_HOST.sub(lambda found: found[1] + self._place.stable_address(found[2]), value)
        return _with_folders(value, mounts)

    def _folder(self, name: str) -> Path:
        if name in self._folders:
            return self._folders[name]
        claim = self._place.claims / self._place.name / name
        claim.mkdir(parents=True, exist_ok=True)
        return claim

    def _volume(self, volume: Json) -> Path:
        folder = self._place.folder / str(volume["name"])
        folder.mkdir(parents=True)
        files: dict[str, str] = {}
        if "configMap" in volume:
            files = contents(self._objects, "ConfigMap", volume["configMap"]["name"])
        elif "secret" in volume:
            files = contents(self._objects, "Secret", volume["secret"]["secretName"])
        elif "emptyDir" not in volume:
            raise ValueError(f"volume {volume['name']}: only configMap, secret and emptyDir are known")
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    @staticmethod
    def _move_files(folder: Path, mounts: Mapping[str, Path]) -> None:
        """Configuration names other files of the container, too."""
        for path in folder.glob("*.conf"):
            path.write_text(_with_folders(path.read_text(), mounts))


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    """$(NAME) is the variable, if it is known, $$ is a dollar sign."""

    def found(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(found, value)


def _with_folders(text: str, mounts: Mapping[str, Path]) -> str:
    """Every path below a mount path is one below our folder. /tmp is /tmp: it is everybody's."""
    for path in sorted(mounts, key=len, reverse=True):
        if path != "/tmp":
            found = re.compile(rf"(?<![\w./-]){re.escape(path)}(?=$|[/\s\"'])")
            text = found.sub(str(mounts[path]).replace("\\", r"\\"), text)
    return text
