"""The npm package as its users get it: packed, installed into an empty folder, used."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sdk.conftest import SDK

pytestmark = pytest.mark.timeout(300)
ROOT = SDK.parents[1]
NODE = shutil.which("node") or "node"
BLOCK = re.compile(r"^```ts\n(.*?)^```\n\n```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("sdk/typescript/README.md", "docs/howto/typescript.md")
CODE = """
const client = new SandboxClient();
const result = await client.run("echo " + version);
console.log(result.stdout.trim() === version, errors.K8eError === K8eError);
await client.close();
"""
# Everything that a strict user would have an opinion on, with declarations of libraries checked.
STRICT = {
    "strict": True,
    "noUncheckedIndexedAccess": True,
    "exactOptionalPropertyTypes": True,
    "noImplicitAny": True,
    "skipLibCheck": False,
    "target": "es2022",
    "lib": ["es2023", "esnext.disposable"],
    "types": ["node"],
    "module": "nodenext",
    "noEmit": True,
}


@pytest.fixture(scope="module")
def environ(gateways: dict[str, str]) -> dict[str, str]:
    """What a program needs to find the gateway."""
    return gateways | {"K8E_SANDBOX_ENDPOINT": gateways["K8E_TEST_ENDPOINT"]}


@pytest.fixture(scope="module")
def installed(
    npm: str,
    packages: Path,
    clean_environ: dict[str, str],
    run: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with nothing but the package and its dependencies, installed without a network."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "package.json").write_text('{"private": true}', "utf-8")
    tarballs: list[str] = []
    for source in (SDK, packages / "yaml", packages / "@bufbuild/protobuf"):
        options = ["--json", "--pack-destination", str(folder)]
        scripts = [] if source is SDK else ["--ignore-scripts"]
        told = run([npm, "pack", *options, *scripts], cwd=source, environ=clean_environ)
        [packed] = json.loads(told[told.index("[\n") :])
        tarballs.append(f"./{packed['filename']}")
        if source is SDK:
            names = {item["path"] for item in packed["files"]}
            assert {"README.md", "LICENSE", "dist/index.mjs", "dist/index.cjs"} <= names
            assert not [
                name
                for name in names
                if not name.startswith(("dist/", "README", "LICENSE", "package"))
            ]
    install = [
        npm,
        "install",
        "--offline",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        *tarballs,
    ]
    run(install, cwd=folder, environ=clean_environ)
    return folder


def script(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_it_works_from_esm(
    installed: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    names = "SandboxClient, K8eError, errors, version"
    path = script(installed, "esm.mjs", f'import {{ {names} }} from "k8e";\n{CODE}')
    assert run([NODE, path], cwd=installed, environ=environ) == "true true\n"


def test_it_works_from_commonjs(
    installed: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    names = "SandboxClient, K8eError, errors, version"
    code = f'const {{ {names} }} = require("k8e");\n(async () => {{{CODE}}})();\n'
    path = script(installed, "common.cjs", code)
    assert run([NODE, path], cwd=installed, environ=environ) == "true true\n"


def test_an_error_is_of_the_same_class_however_it_was_loaded(
    installed: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    code = """
        import { createRequire } from "node:module";
        import { errors } from "k8e";
        const required = createRequire(import.meta.url)("k8e");
        console.log(required.errors.SessionNotFound === errors.SessionNotFound);
    """
    path = script(installed, "both.mjs", code)
    assert run([NODE, path], cwd=installed, environ=environ) == "true\n"


def test_a_bundler_takes_it_in(
    installed: Path, packages: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    names = "SandboxClient, K8eError, errors, version"
    path = script(installed, "bundled.ts", f'import {{ {names} }} from "k8e";\n{CODE}')
    argv = [packages / ".bin/esbuild", path, "--bundle", "--platform=node", "--format=esm"]
    # What is CommonJS in there, of dependencies, needs a `require`.
    banner = 'import {createRequire} from "module"; const require = createRequire(import.meta.url);'
    made = installed / "alone/program.mjs"
    run([*argv, f"--banner:js={banner}", f"--outfile={made}"], cwd=installed, environ=environ)
    alone = script(installed.parent, "program.mjs", made.read_text("utf-8"))  # without packages
    assert run([NODE, alone], cwd=alone.parent, environ=environ) == "true true\n"


def test_a_program_that_forgets_to_close_ends_all_the_same(
    installed: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    code = f"""
        import {{ SandboxClient }} from "k8e";
        process.on("unhandledRejection", (error) => {{ console.log("unhandled", error); }});
        const used = [new SandboxClient(), new SandboxClient("{environ["K8E_TEST_GRPC"]}")];
        for (const client of used) {{
          console.log((await client.status()).version !== "");
          // What fails, whenever it does, leaves nothing that keeps the program alive.
          const wrong = [
            {{ signal: new AbortController() }},
            {{ signal: AbortSignal.abort() }},
            {{ env: {{ A: Symbol() }} }},
            {{ stdin: [5] }},
            {{ cwd: "/nowhere" }},
            {{ requestTimeout: 0.001 }},
          ];
          const made = await client.createSession({{ runtimeClass: "container" }});
          // One that reads to the end: another could end before its input is found wrong.
          const calls = wrong.map((options) => client.exec(made, "cat", options));
          const told = await Promise.allSettled(calls);
          console.log(told.slice(0, 5).every((one) => one.status === "rejected"));
          await client.destroySession(made);
        }}
    """
    path = script(installed, "open.mjs", code)
    with_ca = environ | {"K8E_SANDBOX_CERT": environ["K8E_TEST_CA"]}
    assert run([NODE, path], cwd=installed, environ=with_ca, seconds=30) == "true\n" * 4


@pytest.fixture(scope="module")
def typed(installed: Path, packages: Path) -> Path:
    """The same folder with the types of Node.js, which users have."""
    (installed / "node_modules/@types").mkdir(exist_ok=True)
    for name in ("@types/node", "undici-types"):
        (installed / "node_modules" / name).symlink_to(packages / name)
    return installed


USE = """
    import { errors, Sandbox, SandboxClient, type ExecResult, type SessionInfo } from "k8e";
    export async function use(): Promise<ExecResult> {
      const allowedHosts = ["pkg.test"];
      await using sandbox = await Sandbox.create({ memory: "2G", allowedHosts, cpus: 1 });
      const infos: SessionInfo[] = await Sandbox.list();
      console.log(infos.length);
      // @ts-expect-error: there is no such language
      await sandbox.run("x", "cobol").catch((e: unknown) => e instanceof errors.Denied);
      // @ts-expect-error: there is no such option
      await Sandbox.create("template", { allowed_hosts: [] });
      const client: SandboxClient = sandbox.client;
      const signal = AbortSignal.timeout(1);
      const text: string = await client.readFile(sandbox.id, "a.txt", { signal });
      return await sandbox.run(text, "python", { timeout: 5, env: { A: "b" } });
    }
"""


@pytest.fixture(scope="module")
def compiled(
    typed: Path, packages: Path, environ: dict[str, str], run: Callable[..., str]
) -> dict[str, list[tuple[Path, str]]]:
    """The examples of each page, compiled as strictly as can be, and what each shows."""
    sources = [script(typed, f"use.{kind}", USE) for kind in ("mts", "cts")]
    made: dict[str, list[tuple[Path, str]]] = {}
    for at, page in enumerate(PAGES):
        text = (ROOT / page).read_text("utf-8")
        examples = BLOCK.findall(text)
        assert len(examples) == text.count("```ts\n") >= 3
        for number, (code, shown) in enumerate(examples):
            sources.append(script(typed, f"page{at}-{number}.mts", code))
            program = typed / "made" / f"page{at}-{number}.mjs"
            made.setdefault(page, []).append((program, shown))
    # `await using` is newer than Node.js 20; compilers translate it.
    options = {**STRICT, "noEmit": False, "outDir": "made"}
    files = [path.name for path in sources]
    config = script(
        typed, "tsconfig.json", json.dumps({"compilerOptions": options, "files": files})
    )
    run([NODE, packages / "typescript/bin/tsc", "-p", config], cwd=typed, environ=environ)
    return made


def test_strict_typescript_has_no_complaint_in_either_kind_of_module(
    typed: Path, compiled: object
) -> None:
    assert {path.name for path in (typed / "made").glob("use.*")} == {"use.mjs", "use.cjs"}


def test_no_public_type_is_any(installed: Path) -> None:
    found = [
        f"{path.name}: {line}"
        for path in (installed / "node_modules/k8e/dist/types").glob("*.d.ts")
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"[:<|,] ?any\b", line) and not line.lstrip().startswith("*")
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_print_what_it_shows(
    typed: Path,
    compiled: dict[str, list[tuple[Path, str]]],
    environ: dict[str, str],
    run: Callable[..., str],
    page: str,
) -> None:
    assert page != PAGES[0] or len(compiled[page]) == 5
    for program, shown in compiled[page]:
        assert run([NODE, program], cwd=typed, environ=environ) == shown


def test_the_tool_for_the_ai_sdk_runs_code(
    installed: Path, packages: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    told = run([packages / ".bin/tsx", "examples/ai-sdk.ts"], cwd=SDK, environ=environ)
    assert "stdout: '42\\n'" in told
    assert told.endswith("It is 42.\n")


def test_the_mcp_server_runs_code(
    installed: Path, packages: Path, environ: dict[str, str], run: Callable[..., str]
) -> None:
    tsx = packages / ".bin/tsx"
    argv = [tsx, "examples/mcp-client.ts", tsx, "examples/mcp-server.ts"]
    assert json.loads(run(argv, cwd=SDK, environ=environ)) == [{"type": "text", "text": "42\n"}]


def test_a_clone_is_imported_without_any_package(
    packages: Path, environ: dict[str, str], run: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(SDK / "src", tmp_path / "sdk/typescript/src")
    shutil.copy(SDK / "sandbox_client.ts", tmp_path / "sdk/typescript")
    shutil.copy(SDK / "package.json", tmp_path / "sdk/typescript")
    code = """
        import { sandboxRun } from "./sdk/typescript/sandbox_client";
        const { stdout } = await sandboxRun("echo hello");
        console.log(stdout.trim());
    """
    path = script(tmp_path, "program.mts", code)
    assert run([packages / ".bin/tsx", path], cwd=tmp_path, environ=environ) == "hello\n"


def test_every_public_name_of_python_is_there() -> None:
    page = (ROOT / "docs/reference/sdk-parity.md").read_text("utf-8")
    assert "**missing**" not in page
    assert page.count("\n| `") > 300


def test_every_public_method_of_typescript_is_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SDK), *sys.path])
    parity = importlib.import_module("parity")
    assert parity.only_in_typescript() == set()


def test_it_has_the_version_of_k8e() -> None:
    import k8e

    package = json.loads((SDK / "package.json").read_text("utf-8"))
    assert package["version"] == k8e.__version__
    assert f'"{k8e.__version__}"' in (SDK / "src/version.ts").read_text("utf-8")


def test_the_lock_file_names_no_registry() -> None:
    lock = (SDK / "package-lock.json").read_text("utf-8")
    assert '"resolved"' not in lock
    assert "registry." not in lock
