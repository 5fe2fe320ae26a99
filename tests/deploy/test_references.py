"""Files, peers and secrets that the settings and the pods name exist, or the README mentions them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from outrider.security.callers import Role
from outrider.security.credentials import credential_book
from outrider.security.watched_files import UnusableFile
from tests.deploy.environments import settings_of
from tests.support.manifests import (
    DEPLOY,
    Object,
    containers_of,
    environment_of,
    main_container,
    mounts_of,
    named,
    of_kind,
    pod_of,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

FILES = ("tls_cert", "tls_key", "tls_client_ca", "credentials", "peer_ca", "peer_cert", "peer_key", "peer_token_file")
FOLDERS = {"HOME", "HF_HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR"}
"""Variables that name a folder which is written to."""
OF_CERTIFICATES = {"tls.crt", "tls.key", "ca.crt"}


def complaints_of_files(objects: list[Object]) -> list[str]:
    """Files in settings that are in no volume, or not in the ConfigMap or Secret; folders that cannot be written to."""
    complaints = []
    for each in services_of_ours(objects):
        container, settings = main_container(each), settings_of(each, objects)
        mounts = {PurePosixPath(path): volume for path, volume in mounts_of(each, container)}
        paths = {field: getattr(settings, field) for field in FILES if getattr(settings, field, "")}
        models = {field: getattr(settings, field, None) or "" for field in ("model", "draft_model")}
        paths |= {field: model for field, model in models.items() if model.startswith("/")}
        for field, value in paths.items():
            found = [path for path in mounts if path in PurePosixPath(value).parents]
            if not found:
                complaints.append(f"{title(each)}: {field} {value} is in no volume")
                continue
            mount = max(found, key=lambda path: len(path.parts))
            keys = keys_of(mounts[mount], objects)
            name = str(PurePosixPath(value).relative_to(mount))
            if keys is not None and name not in keys:
                complaints.append(f"{title(each)}: {field} {value} is not among {sorted(keys)}")
        writable = {
            PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
        for name, folder in environment_of(container, objects).items():
            path = PurePosixPath(folder or "/")
            if name in FOLDERS and not writable & {path, *path.parents}:
                complaints.append(f"{title(each)}: {name} {folder} cannot be written to")
    return complaints


PEERS = ("speculator", "datastore", "upstream")
"""Settings with the addresses of peers."""


def keys_of(volume: Object, objects: list[Object]) -> set[str] | None:
    """Names of the files in a volume; None if they are not known here."""
    if "projected" in volume:
        parts = [keys_of(source, objects) for source in volume["projected"]["sources"]]
        return None if None in parts else {key for part in parts for key in part or ()}
    source = volume.get("secret") or volume.get("configMap")
    if source is None:
        return None
    if "items" in source:
        return {item["path"] for item in source["items"]}
    name = source.get("secretName") or source["name"]
    if "configMap" in volume:
        found = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"] == name]
        return set(found[0].get("data", {})) if found else None
    certificates = [each["spec"]["secretName"] for each in of_kind(objects, "Certificate")]
    return OF_CERTIFICATES if name in certificates else None


def complaints_of_peers(objects: list[Object]) -> list[str]:
    """Addresses dialled inside the cluster that no service of the variant has, or that the certificate there lacks."""
    complaints = []
    for each in services_of_ours(objects):
        if each["metadata"]["name"] == "edge-speculator":
            continue  # dials out of its cluster
        settings = settings_of(each, objects)
        for field in PEERS:
            for address in filter(None, getattr(settings, field, "").split(",")):
                complaints += _complaints_of_address(title(each), field, address, objects)
    return complaints


def _complaints_of_address(who: str, field: str, address: str, objects: list[Object]) -> list[str]:
    match = re.fullmatch(r"dns:///([a-z-]+):(\d+)", address)
    if match is None:
        return [f"{who}: {field} {address} is not dns:///SERVICE:PORT, so that calls are not shared among pods"]
    host, port = match[1], int(match[2])
    services = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == host]
    if not services or port not in [each["port"] for each in services[0]["spec"]["ports"]]:
        return [f"{who}: {field} {address} is no service"]
    peer = settings_of(named(objects, "Deployment", host), objects)
    if not peer.tls_cert:
        return []
    mounts = list(mounts_of(*_of(host, objects)))
    (volume,) = (volume for path, volume in mounts if PurePosixPath(path) in PurePosixPath(peer.tls_cert).parents)
    secret = volume["secret"]["secretName"]
    names = {
        n for c in of_kind(objects, "Certificate") if c["spec"]["secretName"] == secret for n in c["spec"]["dnsNames"]
    }
    return [] if host in names else [f"{who}: {field} {address}: the certificate there is for {sorted(names)}"]


def _of(name: str, objects: list[Object]) -> tuple[Object, Object]:
    workload = named(objects, "Deployment", name)
    return workload, main_container(workload)


def complaints_of_callers(objects: list[Object], folder: Path) -> list[str]:
    """Credentials in rendered ConfigMaps that a service refuses, or that reject its callers.

    The files are in `folder` while they are read.
    """
    complaints = []
    for dialler in services_of_ours(objects):
        if dialler["metadata"]["name"] == "edge-speculator":
            continue
        settings = settings_of(dialler, objects)
        addresses = [each for field in PEERS for each in getattr(settings, field, "").split(",")]
        for peer in filter(None, (each.removeprefix("dns:///").partition(":")[0] for each in addresses)):
            text = _credentials_of(peer, objects)
            if text is None:
                continue
            path = folder / f"{peer}.json"
            path.write_text(text, encoding="utf-8")
            has_ca = bool(settings_of(named(objects, "Deployment", peer), objects).tls_client_ca)
            try:
                book = credential_book(str(path), has_client_certificates=has_ca).current()
            except UnusableFile as error:
                complaints.append(f"{peer}: {error}")
                continue
            caller = book.with_certificate(_certified_names(dialler, objects))
            if caller is None or Role.SERVICE not in caller.roles:
                complaints.append(f"{peer} does not let in {title(dialler)}")
    return complaints


def _credentials_of(name: str, objects: list[Object]) -> str | None:
    """The text of a service's credentials; None if it has none or they are in a Secret."""
    workload, container = _of(name, objects)
    path = PurePosixPath(settings_of(workload, objects).credentials)
    for mount, volume in mounts_of(workload, container):
        if PurePosixPath(mount) == path.parent and "configMap" in volume:
            text: str = named(objects, "ConfigMap", volume["configMap"]["name"])["data"][path.name]
            return text
    return None


def _certified_names(workload: Object, objects: list[Object]) -> set[str]:
    """The names in the certificate that a workload presents to its peers."""
    parent = PurePosixPath(getattr(settings_of(workload, objects), "peer_cert", "")).parent
    mounts = mounts_of(workload, main_container(workload))
    secrets = {volume["secret"]["secretName"] for path, volume in mounts if PurePosixPath(path) == parent}
    found = [each["spec"] for each in of_kind(objects, "Certificate") if each["spec"]["secretName"] in secrets]
    return {name for each in found for name in [each.get("commonName", ""), *each.get("dnsNames", [])]}


def references(objects: list[Object]) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of the ConfigMaps and Secrets that pods read; key None = all of it."""
    for each in workloads(objects):
        for container in containers_of(each):
            for variable in container.get("env", []):
                for kind, word in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                    found = variable.get("valueFrom", {}).get(word)
                    if found is not None:
                        yield kind, found["name"], found["key"]
        volumes = pod_of(each)["spec"].get("volumes", [])
        sources = [part for volume in volumes for part in [volume, *volume.get("projected", {}).get("sources", [])]]
        for source in sources:
            for kind, word in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if word in source:
                    name = source[word].get("secretName") or source[word]["name"]
                    items = source[word].get("items") or [{"key": None}]
                    yield from ((kind, name, item["key"]) for item in items)


def complaints_of_references(objects: list[Object], readme: str) -> list[str]:
    """ConfigMaps and Secrets that are neither rendered, nor cert-manager's, nor mentioned in the README."""
    maps = {each["metadata"]["name"]: set(each.get("data", {})) for each in of_kind(objects, "ConfigMap")}
    certificates = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    complaints = []
    for kind, name, key in sorted(set(references(objects)), key=str):
        if kind == "ConfigMap" and name in maps:
            known = key is None or key in maps[name]
        elif kind == "Secret" and name in certificates:
            known = key is None or key in OF_CERTIFICATES
        else:
            words = [f"`{word}`" for word in (name, key) if word is not None]
            known = any(all(word in line for word in words) for line in readme.splitlines())
        complaints += [] if known else [f"{kind} {name}, key {key}, is not there"]
    return complaints


def test_every_file_and_folder_is_there(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_files(objects)) == ""


def test_every_peer_is_there(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_peers(objects)) == ""


def test_services_let_in_who_dials_them(objects: list[Object], tmp_path: Path) -> None:
    assert "\n".join(complaints_of_callers(objects, tmp_path)) == ""


def test_every_secret_and_config_map_is_there_or_told_of(objects: list[Object]) -> None:
    assert complaints_of_references(objects, (DEPLOY / "README.md").read_text(encoding="utf-8")) == []
