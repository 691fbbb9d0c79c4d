"""Templates in the SDK, blocking and asynchronous, over the unix socket and over gRPC."""

from __future__ import annotations

from collections.abc import Generator

import pytest

import k8e
from k8e import AsyncSandboxClient, SandboxClient, errors
from tests.places import Place

RECIPE = {
    "name": "sdk",
    "runtime": "container",
    "description": "for the SDK",
    "limits": {"memory": "128M"},
    "env": {"FROM": "template"},
    "warm": {"python": ("json",)},
}


@pytest.fixture
def template(place: Place) -> Generator[k8e.Template]:
    with SandboxClient(place.endpoint) as client:
        yield client.apply_template(RECIPE)
        client.delete_template("sdk")


def test_templates_are_listed_and_told_in_full(
    client: SandboxClient, template: k8e.Template
) -> None:
    assert template.limits == {"memory": 128 << 20}
    assert (template.warm, template.rootfs) == ({"python": ["json"]}, "host")
    assert (template.source, template.error, template.allowed_hosts) == ("api", "", None)
    assert client.get_template("sdk") == template
    listed = {item.name: item for item in client.list_templates()}
    assert listed["sdk"] == template
    assert listed["default"].source == "built-in"
    with pytest.raises(errors.TemplateNotFound):
        client.get_template("nothing")
    with pytest.raises(errors.InvalidRequest, match="is no key"):
        client.apply_template({"name": "x", "colour": "red"})


def test_a_client_has_a_session_of_its_own_for_each_template(
    place: Place, template: k8e.Template
) -> None:
    with SandboxClient(place.endpoint) as client:
        first = client.run("echo $FROM", template="sdk")
        again = client.run("echo $FROM", template="sdk")
        assert (first.stdout, again.stdout) == ("template\n", "template\n")
        assert first.session_id == again.session_id
        assert client.get_session(first.session_id).template == "sdk"
        with pytest.raises(errors.InvalidRequest, match="no template can be chosen"):
            client.run("true", session_id=first.session_id, template="sdk")
    with SandboxClient(place.endpoint) as client:
        assert client.get_session(first.session_id).phase == "ended"


def test_a_run_and_a_block_are_made_from_a_template(
    place: Place, template: k8e.Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", place.endpoint)
    assert k8e.run("echo $FROM", template="sdk").stdout == "template\n"
    with k8e.sandbox_session(template="sdk", env={"FROM": "me"}) as (client, session_id):
        assert client.exec(session_id, "echo $FROM").stdout == "me\n"


async def test_the_asynchronous_client_does_the_same(endpoint: str, template: k8e.Template) -> None:
    async with AsyncSandboxClient(endpoint, tenant_id="async-template") as client:
        assert await client.get_template("sdk") == template
        assert template in await client.list_templates()
        done = await client.run("echo $FROM", template="sdk")
        assert done.stdout == "template\n"
        with pytest.raises(errors.Conflict, match="was made from template 'sdk'"):
            await client.run("true", template="default")
        await client.destroy_session(done.session_id)
        assert (await client.apply_template({"name": "async", "env": {}})).name == "async"
        await client.delete_template("async")
