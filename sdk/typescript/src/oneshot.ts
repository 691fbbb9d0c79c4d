/**
 * One run, and nothing to look after: a session is made for it and destroyed with it.
 *
 * @module
 */

import { type ClientOptions, SandboxClient } from "./client.ts";
import type { ExecOptions, Language } from "./commands.ts";
import { SessionNotFound } from "./errors.ts";
import type { ExecResult } from "./results.ts";
import type { SessionOptions } from "./sessions.ts";

/** Options of a single run. */
export interface OneshotOptions
  extends ExecOptions, Pick<SessionOptions, "runtimeClass" | "allowedHosts" | "template">, ClientOptions {}

/**
 * Runs source code in a session of its own: `(await sandboxRun("print(1 + 1)", "python")).stdout`. A session takes
 * longer to make than a command to run, so for several commands use a client or a sandbox.
 */
export async function sandboxRun(
  code: string | Uint8Array,
  language: Language = "bash",
  endpointOrOptions: string | OneshotOptions = {},
): Promise<ExecResult> {
  const options: OneshotOptions = typeof endpointOrOptions === "string" ? { endpoint: endpointOrOptions } : endpointOrOptions;
  const { runtimeClass, allowedHosts, template, endpoint, apiKey, profile, tenantId, ...others } = options;
  return sandboxSession(
    { runtimeClass, allowedHosts, template, signal: others.signal },
    (client, sessionId) => client.run(code, language, { ...others, sessionId }),
    { endpoint, apiKey, profile, tenantId },
  );
}

/** Calls `work` with a client and a session that end with it. */
export async function sandboxSession<T>(
  session: SessionOptions,
  work: (client: SandboxClient, sessionId: string) => Promise<T>,
  options: ClientOptions = {},
): Promise<T> {
  const client = new SandboxClient(options);
  try {
    const sessionId = await client.createSession(session);
    try {
      return await work(client, sessionId);
    } finally {
      await client.destroySession(sessionId).catch((error: unknown) => {
        if (!(error instanceof SessionNotFound)) throw error; // it has ended before
      });
    }
  } finally {
    await client.close();
  }
}
