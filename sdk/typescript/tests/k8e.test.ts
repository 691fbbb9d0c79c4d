/** Programs that were written for K8E's TypeScript SDK: nothing is changed but the place of the import. */

import { afterAll, beforeAll, expect, it } from "vitest";

import { errors, type ExecResult, type FileEntry, sandboxRun, SandboxClient, type SessionOptions } from "../sandbox_client.ts";
import { all, caFile, failure, grpc } from "./gateway.ts";

const before = { ...process.env };
let client: SandboxClient;
let sid: string;

beforeAll(async () => {
  // K8E's clients find their gateway by the environment.
  process.env.K8E_SANDBOX_ENDPOINT = grpc;
  process.env.K8E_SANDBOX_CERT = caFile;
  client = new SandboxClient();
  sid = await client.createSession();
});

afterAll(async () => {
  await client.destroySession(sid);
  await client.close();
  for (const name of ["K8E_SANDBOX_ENDPOINT", "K8E_SANDBOX_CERT"]) {
    if (before[name] === undefined) Reflect.deleteProperty(process.env, name);
    else process.env[name] = before[name];
  }
});

it("run gives stdout, stderr and a true exit code", async () => {
  const result: ExecResult = await client.run("print('hello')", "python");
  expect([result.stdout, result.stderr, result.exitCode]).toEqual(["hello\n", "", 0]);
  expect((await client.run("exit 3", "bash", 30)).exitCode).toBe(3);
  expect((await client.run("console.log(6 * 7)", "node")).stdout).toBe("42\n");
});

it("several steps share one session", async () => {
  await client.run("echo 'print(6 * 7)' > analyze.py", "bash");
  expect((await client.run("python3 analyze.py", "bash")).stdout).toBe("42\n");
});

it("a session can be made, used and destroyed", async () => {
  const options: SessionOptions = { runtimeClass: "container", allowedHosts: ["none"], tenantId: "k8e" };
  const own = await client.createSession(options);
  expect(typeof own).toBe("string");
  await client.writeFile(own, "/workspace/main.py", "print('from a file')");
  expect((await client.exec(own, "python3 /workspace/main.py", 30)).stdout).toBe("from a file\n");
  await client.destroySession(own);
});

it("a runtime that this machine does not have is an error with a hint", async () => {
  const error = await failure(client.createSession({ runtimeClass: "kata" }));
  expect(error).toBeInstanceOf(errors.K8eError);
  expect((error as errors.K8eError).hint).not.toBe("");
});

it("output is streamed as text", async () => {
  expect((await all(client.execStream(sid, "echo one; echo two", 300))).join("")).toBe("one\ntwo\n");
});

it("files are text, and are listed with the time of their change", async () => {
  await client.writeFile(sid, "/workspace/a.txt", "text");
  expect(await client.readFile(sid, "/workspace/a.txt")).toBe("text");
  const entries: FileEntry[] = await client.listFiles(sid, 0);
  const entry = entries.find((item) => item.path === "/workspace/a.txt");
  expect(Math.abs((entry?.modified ?? 0) - Date.now() / 1000)).toBeLessThan(3600);
  expect(await client.listFiles(sid, (entry?.modified ?? 0) + 60)).toEqual([]);
});

it("packages are a list, and what cannot be installed is a result", async () => {
  const result = await client.pipInstall(sid, ["there-is-no-such-package"]);
  expect(result.exitCode).not.toBe(0);
});

it("one run needs nothing else", async () => {
  const { stdout } = await sandboxRun("echo hello");
  expect(stdout).toBe("hello\n");
  expect((await sandboxRun("echo elsewhere", "bash", grpc)).stdout).toBe("elsewhere\n");
});

it("a client takes an endpoint and a tenant, in this order", async () => {
  const other = new SandboxClient(grpc, "tenant-of-k8e");
  const { sessionId } = await other.run("true");
  expect((await other.getSession(sessionId)).tenantId).toBe("tenant-of-k8e");
  await other.destroySession(sessionId);
  await other.close();
});
