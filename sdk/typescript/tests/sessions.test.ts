import { afterAll, beforeAll, describe, expect, it } from "vitest";

import { errors, Sandbox, SandboxClient } from "../src/index.ts";
import { endpoint, failure, onEachRuntime } from "./gateway.ts";

let client: SandboxClient;

function thrown(work: () => unknown): unknown {
  try {
    return work();
  } catch (error) {
    return error;
  }
}

beforeAll(() => {
  client = new SandboxClient(endpoint);
});
afterAll(async () => {
  await client.close();
});

it("a session is made, described, extended and destroyed", async () => {
  const sessionId = await client.createSession({
    runtimeClass: "container",
    env: { A: "1" },
    labels: { team: "x" },
    limits: { memory: "256M", pids: 50, cpus: 1, openFiles: 2048 },
    lifetime: 600,
    idleTimeout: 300,
    allowedHosts: [],
  });
  const found = await client.getSession(sessionId);
  expect(found).toMatchObject({ sessionId, runtime: "container", phase: "active", labels: { team: "x" }, envKeys: ["A"] });
  expect(found.limits).toMatchObject({ memory: 256 << 20, pids: 50, open_files: 2048 });
  expect(found.idleTimeout).toBe(300);
  const longer = await client.extendSession(sessionId, 1200);
  expect(longer.expiresAt).toBeGreaterThan(found.expiresAt);
  expect((await client.listSessions()).map((item) => item.sessionId)).toContain(sessionId);
  expect((await client.exec(sessionId, "echo $A")).stdout).toBe("1\n");
  await client.destroySession(sessionId);
  expect(await failure(client.exec(sessionId, "true"))).toBeInstanceOf(errors.SessionNotFound);
  expect((await client.listSessions("", { ended: true })).find((item) => item.sessionId === sessionId)?.phase).toBe("ended");
});

it("creating twice with one request id is creating once", async () => {
  const options = { requestId: "request-of-typescript", runtimeClass: "container" };
  const both = await Promise.all([client.createSession(options), client.createSession(options)]);
  expect(both[0]).toBe(both[1]);
  const error = await failure(client.createSession({ ...options, env: { OTHER: "1" } }));
  expect(error).toBeInstanceOf(errors.Conflict);
  await client.destroySession(both[0]);
});

it.each([
  ["an empty session id", () => client.exec("", "true")],
  ["an empty command", () => client.exec("sess-x", " ")],
  ["hosts that are no list", () => client.createSession({ allowedHosts: "pkg.test" as never })],
  ["a limit that is no number", () => client.createSession({ limits: { memory: "much" } })],
  ["an unknown language", () => client.run("x", "cobol" as never)],
  ["a run id that is none", () => client.start("", ["true"])],
  ["a template for a session that is there", () => client.run("x", "bash", { sessionId: "a", template: "b" })],
  ["a template and an image", () => Sandbox.create("a", { client, image: "b" })],
  ["a sandbox that is made by new", () => Promise.reject(thrown(() => Reflect.construct(Sandbox, []) as Sandbox))],
])("bad input is refused with a reason: %s", async (_, work) => {
  const error = await failure(work);
  expect(error).toBeInstanceOf(errors.InvalidRequest);
  expect(error.message).not.toBe("");
});

// What a compiler would refuse, and JavaScript would let count for nothing.
it.each<[name: string, hint: string, () => unknown]>([
  ["a policy under Python's name", "allowedHosts", () => Sandbox.create({ client, allowed_hosts: [] } as never)],
  ["another SDK's name", "env", () => Sandbox.create({ client, envs: {} } as never)],
  ["a limit's name", "memory", () => client.createSession({ limits: { mem: 1 } as never })],
  ["a client's option", "apiKey", () => new SandboxClient({ apikey: "k8e-1" } as never)],
  ["a run's option", "timeout", () => client.exec("sess-x", "true", { timeoutMs: 5 } as never)],
  ["no option at all", "outputLimit", () => client.exec("sess-x", "true", { colour: "red" } as never)],
  ["arguments one by one", '["ls", "-l"]', () => client.exec("sess-x", "ls", "-l" as never)],
  ["options in the language's place", "options come last", () => client.run("x", { timeout: 5 } as never)],
  ["code that is none", "print(1)", () => client.run(undefined as never)],
  ["content that is none", "JSON.stringify", () => client.writeFile("sess-x", "a", { a: 1 } as never)],
  ["no content", "text", () => client.writeFile("sess-x", "a", undefined as never)],
  ["a signal that is none", "controller.signal", () => client.exec("sess-x", "true", { signal: new AbortController() as never })],
])("what is misspelt never counts for nothing: %s", async (_, hint, work) => {
  const error = (await failure(async () => Promise.resolve(await work()))) as errors.InvalidRequest;
  expect(error).toBeInstanceOf(errors.InvalidRequest);
  expect(error.hint).toContain(hint);
});

it("a session that is not there is an error of its own, with what to do", async () => {
  const error = (await failure(client.exec("sess-none", "true"))) as errors.SessionNotFound;
  expect(error).toBeInstanceOf(errors.SessionNotFound);
  expect(error).toMatchObject({ code: "session_not_found", name: "SessionNotFound" });
  expect(error.hint).not.toBe("");
  expect(error.reason).toBe(error.message);
});

it("code and calls that are too large are refused before they are sent", async () => {
  expect(await failure(client.run(Buffer.alloc(9 << 20), "bash", { sessionId: "a" }))).toBeInstanceOf(errors.LimitExceeded);
  expect(await failure(client.exec("a", ["x".repeat(17 << 20)]))).toBeInstanceOf(errors.LimitExceeded);
  expect(await failure(client.exec("a", Array.from({ length: 70_000 }, () => "x")))).toBeInstanceOf(errors.LimitExceeded);
});

it("a manifest fills the workspace", async () => {
  const sessionId = await client.createSession({
    runtimeClass: "container",
    manifest: [{ file: { path: "a.txt", content: "hello" } }, { dir: { path: "b" } }],
  });
  expect(await client.readFile(sessionId, "a.txt")).toBe("hello");
  await client.destroySession(sessionId);
});

it("a snapshot is saved, listed, restored and deleted", async () => {
  const sessionId = await client.createSession({ runtimeClass: "container" });
  await client.writeFile(sessionId, "kept.txt", "kept");
  const saved = await client.saveSnapshot(sessionId, "typescript-snap", { progress: () => undefined });
  expect(saved).toMatchObject({ name: "typescript-snap", fileCount: 1, sessionId });
  expect(await failure(client.saveSnapshot(sessionId, "typescript-snap"))).toBeInstanceOf(errors.Conflict);
  await client.saveSnapshot(sessionId, "typescript-snap", { replace: true });
  expect((await client.listSnapshots()).map((item) => item.name)).toContain("typescript-snap");
  expect((await client.getSnapshot("typescript-snap")).sizeBytes).toBeGreaterThan(0);
  const again = await client.restoreSnapshot("typescript-snap", { runtimeClass: "container" });
  expect(await client.readFile(again, "kept.txt")).toBe("kept");
  await client.deleteSnapshot("typescript-snap");
  expect(await failure(client.getSnapshot("typescript-snap"))).toBeInstanceOf(errors.SnapshotNotFound);
  await Promise.all([client.destroySession(sessionId), client.destroySession(again)]);
});

it("a template is applied, used and deleted", async () => {
  const made = await client.applyTemplate({ name: "typescript", env: { FROM: "template" }, runtime: "container" });
  expect(made).toMatchObject({ name: "typescript", source: "api", allowedHosts: undefined });
  expect((await client.run("echo $FROM", "bash", { template: "typescript" })).stdout).toBe("template\n");
  {
    await using sandbox = await Sandbox.create("typescript", { client });
    expect((await sandbox.info()).template).toBe("typescript");
  }
  expect((await client.listTemplates()).map((item) => item.name)).toContain("typescript");
  await client.deleteTemplate("typescript");
  expect(await failure(client.getTemplate("typescript"))).toBeInstanceOf(errors.TemplateNotFound);
});

it("an approval is asked for, decided and used", async () => {
  const sessionId = await client.createSession({ runtimeClass: "container" });
  const asked = await client.confirmAction(sessionId, "delete everything", { wait: false });
  expect(asked).toMatchObject({ status: "pending", approved: false });
  expect((await client.listApprovals(sessionId)).map((item) => item.approvalId)).toEqual([asked.approvalId]);
  const waiting = client.confirmAction(sessionId, "delete everything", { approvalId: asked.approvalId });
  await client.approveAction(asked.approvalId, true, "go on");
  expect(await waiting).toMatchObject({ approved: true, reason: "go on" });
  expect((await client.getApproval(asked.approvalId)).decidedAt).toBeGreaterThan(0);
  expect(await failure(client.confirmAction(sessionId, "another", 0.2))).toBeInstanceOf(errors.TimedOut);
  expect(await client.hasApprover()).toBe(false);
  await client.destroySession(sessionId);
});

it("egress is told and changed", async () => {
  const sessionId = await client.createSession({ runtimeClass: "container", allowedHosts: ["none"] });
  expect(await client.egress(sessionId)).toMatchObject({ sessionId, allowedHosts: ["none"], denied: 0 });
  const error = await failure(client.updateAllowedHosts(sessionId, ["not a host"]));
  expect(error).toBeInstanceOf(errors.InvalidRequest);
  expect(await client.changeAllowedHosts(sessionId, { add: ["none"] })).toEqual(expect.any(Array));
  await client.destroySession(sessionId);
});

it("events and the audit trail tell what happened", async () => {
  const sessionId = await client.createSession({ runtimeClass: "container" });
  await client.exec(sessionId, ["true"]);
  const events = await client.events(sessionId);
  expect(events.map((item) => item.kind)).toContain("exec.started");
  expect(events[0]).toMatchObject({ sessionId });
  const rows = await client.audit({ sessionId, action: "exec.*" });
  expect(rows.length).toBeGreaterThan(0);
  expect(rows[0]).toMatchObject({ session: sessionId, outcome: "allowed", via: "socket" });
  const check = await client.verifyAudit();
  expect(check).toMatchObject({ ok: true, problems: [] });
  expect(check.rows).toBeGreaterThan(0);
  expect((await client.verifyAudit(check.head)).ok).toBe(true);
  await client.destroySession(sessionId);
});

it("secrets are variables of sessions, and are never told", async () => {
  const kept = await client.setSecret("typescript", "very-secret-value", { key: "token" });
  expect(kept).toMatchObject({ name: "typescript", key: "token" });
  const sessionId = await client.createSession({ runtimeClass: "container", secrets: { TOKEN: "typescript:token" } });
  expect((await client.exec(sessionId, 'test "$TOKEN" = very-secret-value')).exitCode).toBe(0);
  expect((await client.getSession(sessionId)).secretEnvVars).toEqual(["TOKEN"]);
  expect((await client.listSecrets()).map((item) => item.name)).toContain("typescript");
  expect(await client.deleteSecret("typescript")).toBe(1);
  await client.destroySession(sessionId);
});

it("sub-agents share the workspace of their parent", async () => {
  const parent = await client.createSession({ runtimeClass: "container" });
  const child = await client.runSubagent(parent, "research", "/workspace/results");
  await client.exec(child, "echo found > found.txt");
  expect(await client.readFile(parent, "results/found.txt")).toBe("found\n");
  expect(await client.getSession(child)).toMatchObject({ parentId: parent, labels: { agent_type: "research" } });
  await client.destroySession(parent);
});

it("the gateway tells how it is", async () => {
  expect((await client.status()).version).toMatch(/^\d/);
  expect(await client.doctor()).toHaveProperty("runtimes");
  expect((await client.pool()).every((item) => typeof item.ready === "number")).toBe(true);
  expect(await client.listImages()).toEqual([]);
  expect(await failure(client.removeImage("registry.invalid/none:1"))).toBeInstanceOf(errors.ImageNotFound);
});

onEachRuntime("a paused session", (shared, runtime) => {
  it("does nothing until it is resumed", async () => {
    const { client: own, sessionId } = shared;
    await own.pauseSession(sessionId);
    expect(await failure(own.exec(sessionId, "true"))).toBeInstanceOf(errors.SessionPaused);
    await own.resumeSession(sessionId);
    expect((await own.exec(sessionId, "echo on")).stdout).toBe("on\n");
  });

  it(`an exposed port is fetched once the server listens (${runtime})`, async () => {
    const { client: own, sessionId } = shared;
    await own.writeFile(sessionId, "index.html", "hello from a sandbox");
    const exposed = await own.expose(sessionId, 8000);
    expect(await failure(exposed.wait(0.1))).toBeInstanceOf(errors.TimedOut);
    await own.start(sessionId, ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"]);
    await exposed.wait();
    expect(await (await fetch(exposed.url)).text()).toBe("hello from a sandbox");
    expect(await (await fetch(exposed.baseUrl, { headers: exposed.headers })).text()).toBe("hello from a sandbox");
    expect((await own.listExposed(sessionId)).map((item) => item.port)).toEqual([8000]);
    await own.unexpose(sessionId, 8000);
    expect(await failure(own.unexpose(sessionId, 8000))).toBeInstanceOf(errors.NotExposed);
  });
});

describe.each(["container", "gvisor"])("a sandbox (%s)", (runtime) => {
  it("runs, keeps files and variables, and ends with its block", async () => {
    let id: string;
    {
      await using sandbox = await Sandbox.create({ client, runtime, memory: "512M", cpus: 1, allowedHosts: [] });
      ({ id } = sandbox);
      expect((await sandbox.run("print(6 * 7)", "python")).stdout).toBe("42\n");
      expect((await sandbox.exec("echo $((1 + 1))")).stdout).toBe("2\n");
      await sandbox.files.write("a/b.txt", "text");
      expect(await sandbox.files.read("a/b.txt")).toBe("text");
      await sandbox.files.rename("a/b.txt", "a/c.txt");
      await sandbox.files.mkdir("a/below/deep");
      const paths = async (depth?: number): Promise<string[]> => (await sandbox.files.list("a", { depth })).map((item) => item.path);
      expect((await paths()).sort()).toEqual(["/workspace/a/below", "/workspace/a/c.txt"]); // as in Python
      expect(await paths(0)).toContain("/workspace/a/below/deep");
      expect((await sandbox.files.stat("a/c.txt")).size).toBe(4);
      await sandbox.files.remove("a", { recursive: true });
      const context = await sandbox.context();
      await context.run("x = 20");
      expect((await context.run("x + 1")).text).toBe("21");
      const run = await sandbox.start("echo begun; sleep 60");
      expect((await run.poll()).status).toBe("running");
      await run.kill();
      expect((await sandbox.info()).limits.memory).toBe(512 << 20);
      await sandbox.pause();
      await sandbox.resume();
      const same = await Sandbox.connect(id, { client });
      expect((await same.exec("echo same")).stdout).toBe("same\n");
      await same.close();
      expect((await Sandbox.list({ client })).map((item) => item.sessionId)).toContain(id);
    }
    expect(await failure(Sandbox.connect(id, { client }))).toBeInstanceOf(errors.SessionNotFound);
  });
});

it("a sandbox has a client of its own unless it is given one", async () => {
  const sandbox = await Sandbox.create({ endpoint });
  expect((await sandbox.run("echo alone")).stdout).toBe("alone\n");
  await sandbox.kill();
  expect(await failure(sandbox.exec("true"))).toBeInstanceOf(errors.ClientClosed);
  expect((await client.listSessions()).map((item) => item.sessionId)).not.toContain(sandbox.id);
});

