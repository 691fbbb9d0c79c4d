/**
 * What tests know of the gateways that they are run against; `tests/sdk/test_typescript.py` starts them.
 */

import { afterAll, beforeAll, describe } from "vitest";

import { SandboxClient } from "../src/index.ts";

function variable(name: string): string {
  const value = process.env[name];
  if (value === undefined) throw new Error(`${name} is not set; run tests/sdk/test_typescript.py, which starts a gateway`);
  return value;
}

/** A gateway that all tests share: its socket, its gRPC endpoint and its CA. */
export const endpoint = variable("K8E_TEST_ENDPOINT");
export const grpc = variable("K8E_TEST_GRPC");
export const caFile = variable("K8E_TEST_CA");
export const python = variable("K8E_TEST_PYTHON");
/** Variables of a place where no gateway runs, and one may be started, killed and stopped. */
export const ownPlace = JSON.parse(variable("K8E_TEST_PLACE")) as Record<string, string>;
/** The same, for programs of tests. */
export const runtimes = ["container", "gvisor"] as const;

export type Runtime = (typeof runtimes)[number];

/** What tests of one runtime share. */
export interface Shared {
  client: SandboxClient;
  sessionId: string;
}

/** Describes what holds on every runtime, in a session of its own. */
export function onEachRuntime(name: string, tests: (shared: Shared, runtime: Runtime) => void): void {
  describe.each(runtimes)(`${name} (%s)`, (runtime) => {
    const shared = {} as Shared;
    beforeAll(async () => {
      shared.client = new SandboxClient(endpoint);
      shared.sessionId = await shared.client.createSession({ runtimeClass: runtime });
    });
    afterAll(async () => {
      await shared.client.destroySession(shared.sessionId);
      await shared.client.close();
    });
    tests(shared, runtime);
  });
}

/** The error of something that must fail. */
export async function failure(work: Promise<unknown> | (() => Promise<unknown>)): Promise<Error> {
  try {
    await (typeof work === "function" ? work() : work);
  } catch (error) {
    if (error instanceof Error) return error;
    throw error;
  }
  throw new Error("it did not fail");
}

/** Runs something with other variables. */
export async function withEnvironment<T>(variables: Record<string, string | undefined>, work: () => Promise<T>): Promise<T> {
  const before = { ...process.env };
  for (const [name, value] of Object.entries(variables)) {
    if (value === undefined) Reflect.deleteProperty(process.env, name);
    else process.env[name] = value;
  }
  try {
    return await work();
  } finally {
    for (const name of Object.keys(variables)) {
      const old = before[name];
      if (old === undefined) Reflect.deleteProperty(process.env, name);
      else process.env[name] = old;
    }
  }
}

/** Everything that an async iterable gives. */
export async function all<T>(items: AsyncIterable<T>): Promise<T[]> {
  const found: T[] = [];
  for await (const item of items) found.push(item);
  return found;
}

/** Asks again until the answer is true; for what nobody reports. */
export async function eventually(check: () => Promise<boolean> | boolean, seconds = 20): Promise<void> {
  const until = performance.now() + seconds * 1000;
  while (!(await check())) {
    if (performance.now() > until) throw new Error(`not within ${seconds} s`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
