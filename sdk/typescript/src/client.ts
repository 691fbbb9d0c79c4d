/**
 * The client: everything that a gateway can do, by ids. {@link Sandbox} is the same as objects.
 *
 * @module
 */

import { type Approval, approval, type ConfirmOptions } from "./approvals.ts";
import { type AuditCheck, auditCall, auditCheck, type AuditFilter, type AuditRow, auditRows } from "./audit.ts";
import * as commands from "./commands.ts";
import type { Command, ExecOptions, Language, RunOptions } from "./commands.ts";
import { type CallOptions, Connections } from "./connections.ts";
import { type Content, decode, type Progress } from "./content.ts";
import * as contexts from "./contexts.ts";
import type { Context, ContextInfo, ContextLanguage, CreateContextOptions } from "./contexts.ts";
import { type Egress, egress } from "./egress.ts";
import { type EndpointOptions, parse, resolve } from "./endpoints.ts";
import { ClientClosed, InvalidRequest, K8eError, SandboxDied, SessionNotFound } from "./errors.ts";
import { type Event, event } from "./events.ts";
import { Exposed, LOOPBACK, type WaitOptions, waitForPort } from "./exposures.ts";
import * as files from "./files.ts";
import type { FileEntry, ListOptions, ReadOptions, WriteOptions } from "./files.ts";
import { type Image, image } from "./images.ts";
import { checkOptions, type Names, optionsOf } from "./options.ts";
import { pipCommand } from "./packages.ts";
import { type PoolInfo, poolInfo, type SetPoolOptions } from "./pool.ts";
import { Process } from "./processes.ts";
import { dicts, isDict, named, number, text, texts } from "./records.ts";
import { type ExecEvent, type ExecInfo, execInfo, type ExecResult, type ProcessInfo, processes } from "./results.ts";
import * as runs from "./runs.ts";
import { type OutputOptions, Run } from "./runs.ts";
import { secret, type SecretInfo, type SecretOptions } from "./secrets.ts";
import { createCall, oneSession, session, type SessionInfo, type SessionOptions, words } from "./sessions.ts";
import { type Snapshot, snapshot } from "./snapshots.ts";
import { type Recipe, type Template, template } from "./templates.ts";
import { type Copied, type CopyOptions, TreeCopy } from "./trees.ts";
import type { Dict, Packable } from "./wire.ts";

/** Options of a client. */
export interface ClientOptions extends EndpointOptions {
  /** Whose standing session `run` uses; without one the client makes a session of its own. */
  tenantId?: string | undefined;
  /**
   * Seconds after which a call fails that the gateway has not answered; of programs, whose start it has not
   * answered. 0, the default, means never.
   */
  requestTimeout?: number | undefined;
}

const CLIENT_NAMES: Names<ClientOptions> = { endpoint: true, apiKey: true, profile: true, tenantId: true, requestTimeout: true };

/** Called with what was moved so far, and how much it will be, or undefined. */
export type SnapshotProgress = CallOptions & { progress?: Progress | undefined };

/** How a time-out in seconds, or all options, are given. */
export type TimeoutOr<Options> = number | Options;

/**
 * Runs code in sandboxes.
 *
 * The gateway is `endpoint`, that of `K8E_SANDBOX_ENDPOINT`, of `profile` or of the current profile; without any
 * of them it is this host's own, which is started if it does not run. {@link SandboxClient.run} needs no session:
 * the client makes one of its own, which ends with {@link SandboxClient.close}, or uses the standing one of
 * `tenantId`, which does not.
 *
 * ```ts
 * await using client = new SandboxClient();
 * console.log((await client.run("print(1 + 1)", "python")).stdout);
 * ```
 */
export class SandboxClient implements AsyncDisposable {
  readonly tenantId: string;
  /** @internal */
  readonly connections: Connections;
  private own = new Map<string, Promise<string>>(); // the session of each template
  private closing = false;
  private readonly streamed = new Set<commands.RunningCommand>(); // that end with their reader
  private readonly programs = new Set<Process>();

  constructor(endpointOrOptions?: string | ClientOptions | null, tenantId = "") {
    const options: ClientOptions =
      typeof endpointOrOptions === "string" ? { endpoint: endpointOrOptions } : (endpointOrOptions ?? {});
    checkOptions("a client", options, CLIENT_NAMES);
    this.tenantId = tenantId || options.tenantId || "";
    if (options.endpoint) parse(options.endpoint); // what is malformed is told at once
    this.connections = new Connections(() => resolve(options), options.requestTimeout);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /**
   * Destroys the client's own sessions, if it made any, and closes its connections. Programs end whose output
   * somebody was still iterating over, or that were opened to be talked to. Whatever is asked of the client or its
   * handles later is refused ({@link errors.ClientClosed}).
   */
  async close(): Promise<void> {
    if (this.closing) return;
    this.closing = true;
    const own = [...this.own.values()];
    this.own.clear();
    try {
      await Promise.all([...this.streamed].map((command) => command.kill()));
      await Promise.all([...this.programs].map((program) => program.close()));
      await Promise.all(own.map((id) => id.then((sessionId) => this.destroySession(sessionId)).catch(() => undefined)));
    } finally {
      this.connections.close();
    }
  }

  // Programs.

  /** Runs source code; never through a shell line. */
  async run(code: string | Uint8Array, language: Language = "bash", options: TimeoutOr<RunOptions> = {}): Promise<ExecResult> {
    const all = withTimeout<RunOptions>(options, 30);
    const { sessionId, template: recipe = "" } = all;
    if (sessionId && recipe) {
      throw new InvalidRequest(`the run is in session ${sessionId.slice(0, 80)}, so no template can be chosen for it`, {
        hint: "createSession({ template }) makes another session",
      });
    }
    const attempt = (where: commands.SessionName): Promise<ExecResult> =>
      commands.collect(this.connections, commands.codeCall(where, code, language, all), all);
    if (sessionId) return attempt(commands.byId(sessionId));
    if (this.tenantId) return attempt(commands.auto(this.tenantId, recipe));
    const made = this.ownSession(recipe);
    try {
      return await attempt(commands.byId(await made));
    } catch (error) {
      if (!(error instanceof SessionNotFound || error instanceof SandboxDied)) throw error;
      if (this.own.get(recipe) === made) this.own.delete(recipe);
      if (error instanceof SandboxDied) throw error; // the code may have run
    }
    return attempt(commands.byId(await this.ownSession(recipe)));
  }

  private ownSession(recipe: string): Promise<string> {
    if (this.closing) throw new ClientClosed();
    let found = this.own.get(recipe);
    if (found === undefined) {
      found = this.createSession({ template: recipe });
      this.own.set(recipe, found);
      found.catch(() => this.own.delete(recipe));
    }
    return found;
  }

  /** Runs a command and collects its output; text is for the shell, a list for no shell. */
  async exec(sessionId: string, command: Command, options: TimeoutOr<ExecOptions> = {}): Promise<ExecResult> {
    const all = withTimeout(options, 30);
    return commands.collect(this.connections, commands.commandCall(commands.byId(sessionId), command, all), all);
  }

  /**
   * Runs a command while iterating over its output and, last, its exit. Reading slowly slows the command down;
   * leaving the loop kills it.
   */
  execEvents(
    sessionId: string,
    command: Command,
    options: TimeoutOr<ExecOptions> = {},
  ): AsyncGenerator<ExecEvent, void, void> {
    const all: ExecOptions = { outputLimit: 0, ...withTimeout(options, 300) };
    const call = commands.commandCall(commands.byId(sessionId), command, all);
    return commands.events(this.connections, call, all, this.streamed);
  }

  /** Runs a command while iterating over its standard output as text. */
  async *execStream(
    sessionId: string,
    command: Command,
    options: TimeoutOr<ExecOptions> = {},
  ): AsyncGenerator<string, void, void> {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    for await (const one of this.execEvents(sessionId, command, options)) {
      const chunk = one.type === "stdout" ? decoder.decode(one.data, { stream: true }) : "";
      if (chunk) yield chunk;
    }
    const rest = decoder.decode();
    if (rest) yield rest;
  }

  /** The commands that run in a session, and those that ended not long ago. */
  async execs(sessionId: string, options?: CallOptions): Promise<ExecInfo[]> {
    return dicts((await this.inSession("execs", sessionId, options)).execs).map(execInfo);
  }

  /** Ends a command and everything that it started. */
  async kill(sessionId: string, execId: string, options?: CallOptions): Promise<void> {
    await this.call(commands.runCall("signal", commands.runId(sessionId, execId), { terminate: true }), options);
  }

  /** Starts a command, or source code in `language`, that runs on without us; returns its handle. */
  async start(
    sessionId: string,
    command: Command,
    options: TimeoutOr<Omit<ExecOptions, "stdin"> & { language?: Language | undefined }> = {},
  ): Promise<Run> {
    const { language, ...all } = withTimeout<ExecOptions & { language?: Language | undefined }>(options, 0);
    const where = commands.byId(sessionId);
    let call: commands.ExecCall;
    if (language === undefined) call = commands.commandCall(where, command, all);
    else if (typeof command === "string") call = commands.codeCall(where, command, language, all);
    else throw new InvalidRequest("source code is text, not a list", { hint: "leave the language out to run a command" });
    return runs.start(this.connections, commands.inBackground(call, all.outputLimit ?? 0), all);
  }

  /** The handle of a run that was started before, here or elsewhere; makes no call. */
  getRun(runId: string): Run {
    return new Run(this.connections, runId);
  }

  /** Starts a program to write to and read from while it runs; it ends with the handle. */
  async open(
    sessionId: string,
    command: Command,
    options: TimeoutOr<Omit<ExecOptions, "stdin"> & { stdin?: boolean | undefined }> = {},
  ): Promise<Process> {
    const { stdin = true, ...others } = optionsOf(options);
    const all: ExecOptions = { outputLimit: 0, killOnDisconnect: true, ...others };
    const call = commands.commandCall(commands.byId(sessionId), command, { ...all, stdin: stdin ? "" : undefined });
    const program = await Process.open(this.connections, call, { ...all, onEnd: (ended) => this.programs.delete(ended) });
    this.programs.add(program);
    return program;
  }

  /** Starts a program on a terminal: by default `bash`, or `sh` where there is none. */
  async terminal(
    sessionId: string,
    program?: Command,
    options: Omit<ExecOptions, "stdin" | "tty"> & { rows?: number | undefined; columns?: number | undefined } = {},
  ): Promise<Process> {
    const { rows = 24, columns = 80, ...others } = options;
    const all = { ...others, tty: [rows, columns] as const };
    if (program !== undefined) return this.open(sessionId, program, all);
    try {
      return await this.open(sessionId, ["bash"], all);
    } catch (error) {
      if (!(error instanceof K8eError && error.code === "ENOENT")) throw error;
      return this.open(sessionId, ["sh"], all);
    }
  }

  /** Sets the window size of a command's terminal. */
  async resize(sessionId: string, execId: string, rows: number, columns: number, options?: CallOptions): Promise<void> {
    await this.call(commands.runCall("resize", commands.runId(sessionId, execId), { rows, cols: columns }), options);
  }

  /** All programs that run in a session's sandbox. */
  async processes(sessionId: string, options?: CallOptions): Promise<ProcessInfo[]> {
    return processes(await this.inSession("processes", sessionId, options));
  }

  /**
   * Iterates over what all programs of a session printed, from byte `start` on; the newest 512 KiB are kept. Last
   * comes an exit, with the code of the run that ended last, if nothing runs by then; with `follow` it is waited for.
   */
  transcript(sessionId: string, options: OutputOptions = {}): AsyncGenerator<ExecEvent, void, void> {
    const call = { op: "transcript", session: commands.byId(sessionId), seq: options.start ?? 0 };
    return runs.attach(this.connections, call, { ...options, follow: options.follow ?? false });
  }

  /** Installs Python packages (`["requests>=2.28"]`); the next import finds them. */
  async pipInstall(
    sessionId: string,
    packages: readonly string[],
    options: TimeoutOr<CallOptions & { timeout?: number | undefined }> = {},
  ): Promise<ExecResult> {
    return this.exec(sessionId, pipCommand(packages), withTimeout(options, 120));
  }

  // Sessions.

  /** Makes a session; returns its id. */
  async createSession(options: SessionOptions = {}): Promise<string> {
    const told = await this.call(createCall(options, options.tenantId || this.tenantId), options);
    return oneSession(told).sessionId;
  }

  async getSession(sessionId: string, options?: CallOptions): Promise<SessionInfo> {
    return oneSession(await this.onSession("get_session", sessionId, options));
  }

  /** Your sessions; with `ended` also those that ended within a day. */
  async listSessions(tenantId = "", options: CallOptions & { ended?: boolean | undefined } = {}): Promise<SessionInfo[]> {
    const call = { op: "list_sessions", tenant: tenantId, ended: options.ended ?? false };
    return dicts((await this.call(call, options)).sessions).map(session);
  }

  /** Lets a session live `lifetime` seconds from now. */
  async extendSession(sessionId: string, lifetime: number, options?: CallOptions): Promise<SessionInfo> {
    return oneSession(await this.onSession("extend_session", sessionId, options, { lifetime }));
  }

  /** Destroys a session and everything in it. */
  async destroySession(sessionId: string, options?: CallOptions): Promise<void> {
    await this.onSession("destroy_session", sessionId, options);
  }

  /**
   * Makes a session for a sub-agent; returns its id. It is a sandbox of its own, and shares its parent's `/workspace`. It
   * ends with its parent at the latest.
   */
  async runSubagent(parentSessionId: string, agentType = "", workspacePath = "", options?: CallOptions): Promise<string> {
    const call = {
      op: "run_subagent",
      parent_session_id: parentSessionId,
      agent_type: agentType,
      workspace_path: workspacePath,
    };
    return oneSession(await this.call(call, options)).sessionId;
  }

  /** Freezes a session, and its sub-agents, until it is resumed. */
  async pauseSession(sessionId: string, options?: CallOptions): Promise<void> {
    await this.onSession("pause_session", sessionId, options);
  }

  /** Lets a session, and its sub-agents, go on where they stopped. */
  async resumeSession(sessionId: string, options?: CallOptions): Promise<void> {
    await this.onSession("resume_session", sessionId, options);
  }

  /** Events of a session, or of all of yours, oldest first: the newest `limit` ones. */
  async events(sessionId = "", limit = 500, options?: CallOptions): Promise<Event[]> {
    return texts((await this.onSession("events", sessionId, options, { limit })).events).map(event);
  }

  // Egress.

  /** Replaces what a session may reach; returns the policy in effect, with `default` spelled out. */
  async updateAllowedHosts(sessionId: string, hosts: readonly string[], options?: CallOptions): Promise<string[]> {
    return texts((await this.onSession("update_allowed_hosts", sessionId, options, { hosts: words(hosts) })).hosts);
  }

  /** Adds words to what a session may reach, and removes others; returns the policy in effect. */
  async changeAllowedHosts(
    sessionId: string,
    changes: { add?: readonly string[]; remove?: readonly string[] },
    options?: CallOptions,
  ): Promise<string[]> {
    const fields = { add: words(changes.add ?? []), remove: words(changes.remove ?? []) };
    return texts((await this.onSession("change_allowed_hosts", sessionId, options, fields)).hosts);
  }

  /** What a session may reach, and what it was refused. */
  async egress(sessionId: string, options?: CallOptions): Promise<Egress> {
    return egress(await this.onSession("egress", sessionId, options));
  }

  // Contexts.

  /** Starts a program that keeps its variables between runs. */
  createContext(sessionId: string, language: ContextLanguage = "python", options: CreateContextOptions = {}): Promise<Context> {
    return contexts.create(this.connections, sessionId, language, options);
  }

  /** The handle of a context that was made before, here or elsewhere; makes no call. */
  getContext(sessionId: string, contextId: string): Context {
    return new contexts.Context(this.connections, sessionId, contextId);
  }

  listContexts(sessionId: string, options: CallOptions = {}): Promise<ContextInfo[]> {
    return contexts.list(this.connections, sessionId, options);
  }

  // Files. Paths are absolute, or relative to /workspace.

  /** Writes a file; returns the number of bytes. A new one appears whole or not at all; folders above it are made. */
  writeFile(sessionId: string, path: string, content: Content, options: WriteOptions = {}): Promise<number> {
    const call = files.fileCall("write", sessionId, path, { append: options.append ?? false, mode: options.mode });
    return files.write(this.connections, call, content, this.moving(options));
  }

  /** A file as text; invalid UTF-8 is replaced. */
  async readFile(sessionId: string, path: string, options: ReadOptions = {}): Promise<string> {
    return decode(await this.readBytes(sessionId, path, options));
  }

  readBytes(sessionId: string, path: string, options: ReadOptions = {}): Promise<Uint8Array> {
    return files.read(this.connections, readCall(sessionId, path, options), this.moving(options));
  }

  /** A file, piece by piece, in constant memory. */
  readChunks(sessionId: string, path: string, options: ReadOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    return files.readChunks(this.connections, readCall(sessionId, path, options), this.moving(options));
  }

  /** A file as a web stream. */
  readStream(sessionId: string, path: string, options: ReadOptions = {}): ReadableStream<Uint8Array> {
    return files.stream(this.readChunks(sessionId, path, options));
  }

  /** Files below a folder that changed after `since` (seconds since 1970). */
  listFiles(sessionId: string, since = 0, options: ListOptions = {}): Promise<FileEntry[]> {
    return files.list(this.connections, sessionId, since, options);
  }

  async stat(sessionId: string, path: string, options: CallOptions & { follow?: boolean | undefined } = {}): Promise<FileEntry> {
    return files.entry(await this.call(files.fileCall("stat", sessionId, path, { follow: options.follow ?? false }), options));
  }

  /** Removes a file, an empty folder, or a tree. */
  async remove(sessionId: string, path: string, options: CallOptions & { recursive?: boolean | undefined } = {}): Promise<void> {
    await this.call(files.fileCall("remove", sessionId, path, { recursive: options.recursive ?? false }), options);
  }

  /** Moves a file; makes the folders above. */
  async rename(sessionId: string, path: string, to: string, options?: CallOptions): Promise<void> {
    await this.call(files.fileCall("rename", sessionId, path, { to }), options);
  }

  /** Makes a folder and those above it. */
  async mkdir(sessionId: string, path: string, options: CallOptions & { existOk?: boolean | undefined } = {}): Promise<void> {
    await this.call(files.fileCall("mkdir", sessionId, path, { exist_ok: options.existOk ?? true }), options);
  }

  /** Makes a symbolic link, replacing a file or link of that name. */
  async symlink(sessionId: string, path: string, target: string, options?: CallOptions): Promise<void> {
    await this.call(files.fileCall("symlink", sessionId, path, { target }), options);
  }

  async chmod(sessionId: string, path: string, mode: number, options?: CallOptions): Promise<void> {
    await this.call(files.fileCall("chmod", sessionId, path, { mode }), options);
  }

  /** Makes `path` a copy of a local file or folder. A folder that is there is added to. */
  upload(sessionId: string, source: string, path: string, options: CopyOptions = {}): Promise<Copied> {
    return new TreeCopy(this.connections, sessionId, options).upload(source, path);
  }

  /** Makes a local file or folder a copy of one in the sandbox. Nothing that the sandbox says leads out of it. */
  download(sessionId: string, path: string, target: string, options: CopyOptions = {}): Promise<Copied> {
    return new TreeCopy(this.connections, sessionId, options).download(path, target);
  }

  // Exposed ports.

  /** Makes a port of a session's sandbox reachable, on a URL with a token. The server need not run yet. */
  async expose(sessionId: string, port: number, host = LOOPBACK, options?: CallOptions): Promise<Exposed> {
    const fields = { session_id: commands.byId(sessionId).id, port, host };
    return new Exposed(this.connections, await this.call({ op: "expose", ...fields }, options));
  }

  /** Closes a URL, and every connection that came through it. */
  async unexpose(sessionId: string, port: number, options?: CallOptions): Promise<void> {
    await this.call({ op: "unexpose", session_id: commands.byId(sessionId).id, port }, options);
  }

  /**
   * Waits until a server in the sandbox accepts connections, on a port that is exposed or not; {@link errors.TimedOut}
   * if none does in time. One call: the sandbox watches for the server.
   */
  async waitForPort(sessionId: string, port: number, options: TimeoutOr<WaitOptions> = {}): Promise<void> {
    await waitForPort(this.connections, sessionId, port, withTimeout(options, 30));
  }

  /** Exposed ports of one session, or of all of yours, oldest first. */
  async listExposed(sessionId = "", options?: CallOptions): Promise<Exposed[]> {
    const told = await this.onSession("list_exposed", sessionId, options);
    return dicts(told.services).map((item) => new Exposed(this.connections, item));
  }

  // Approvals.

  /** Asks for approval of an action, and waits for the decision. A yes is good for one action, once. */
  async confirmAction(sessionId: string, action: string, options: TimeoutOr<ConfirmOptions> = {}): Promise<Approval> {
    const all = withTimeout<ConfirmOptions>(options, 300);
    const fields = {
      action,
      approval_id: all.approvalId ?? "",
      timeout: all.timeout ?? 300,
      wait: all.wait ?? true,
      expires: all.expires ?? 0,
    };
    return approval(await this.onSession("confirm_action", sessionId, all, fields));
  }

  /** Decides on an action, once; where there is an approver, with the approver's secret. */
  async approveAction(
    approvalId: string,
    approved = true,
    reason = "",
    options: CallOptions & { secret?: string | undefined } = {},
  ): Promise<Approval> {
    const call = { op: "approve_action", approval_id: approvalId, approved, reason, secret: options.secret ?? "" };
    return approval(await this.call(call, options));
  }

  async getApproval(approvalId: string, options?: CallOptions): Promise<Approval> {
    return approval(await this.call({ op: "get_approval", approval_id: approvalId }, options));
  }

  /** Actions that wait for a decision, oldest first. */
  async listApprovals(sessionId = "", options?: CallOptions): Promise<Approval[]> {
    return dicts((await this.onSession("list_approvals", sessionId, options)).approvals).map(approval);
  }

  /** Makes approvals need `secret` from now on; replacing one needs the `current` one. */
  async setApprover(secret: string, options: CallOptions & { current?: string | undefined } = {}): Promise<void> {
    await this.call({ op: "set_approver", secret, current: options.current ?? "" }, options);
  }

  /** Whether approvals need a secret; without one they are advisory. */
  async hasApprover(options?: CallOptions): Promise<boolean> {
    return (await this.call({ op: "approver" }, options)).configured === true;
  }

  // Snapshots.

  /** Saves a session's /workspace, under a name. */
  async saveSnapshot(
    sessionId: string,
    name: string,
    options: SnapshotProgress & { replace?: boolean | undefined } = {},
  ): Promise<Snapshot> {
    const call = { op: "save_snapshot", session_id: sessionId, name, replace: options.replace ?? false };
    return snapshot(await this.watched(call, options));
  }

  /** Makes a session whose /workspace begins with a snapshot; returns its id. */
  async restoreSnapshot(name: string, options: SessionOptions & SnapshotProgress = {}): Promise<string> {
    const call = createCall({ ...options, snapshot: name }, options.tenantId || this.tenantId);
    return oneSession(await this.watched(call, options)).sessionId;
  }

  /** Your snapshots, oldest first. */
  async listSnapshots(options?: CallOptions): Promise<Snapshot[]> {
    return dicts((await this.call({ op: "list_snapshots" }, options)).snapshots).map(snapshot);
  }

  async getSnapshot(name: string, options?: CallOptions): Promise<Snapshot> {
    return snapshot(await this.call({ op: "get_snapshot", name }, options));
  }

  /** Deletes a snapshot; sessions that were made from it stay as they are. */
  async deleteSnapshot(name: string, options?: CallOptions): Promise<void> {
    await this.call({ op: "delete_snapshot", name }, options);
  }

  // Templates.

  /** All templates, including unusable ones: their `error` says why. */
  async listTemplates(options?: CallOptions): Promise<Template[]> {
    return dicts((await this.call({ op: "list_templates" }, options)).templates).map(template);
  }

  async getTemplate(name: string, options?: CallOptions): Promise<Template> {
    return template(await this.call({ op: "get_template", name }, options));
  }

  /** Stores a recipe under its `name`, in place of the one before. Needs the role `admin`. */
  async applyTemplate(recipe: Recipe, options?: CallOptions): Promise<Template> {
    return template(await this.call({ op: "apply_template", template: recipe }, options));
  }

  /** Deletes a template that was applied by API; sessions that were made from it stay. */
  async deleteTemplate(name: string, options?: CallOptions): Promise<void> {
    await this.call({ op: "delete_template", name }, options);
  }

  // Images. These need the role `admin`.

  /** Fetches an image from its registry, even if the name is known already: tags move. */
  async pullImage(reference: string, options: SnapshotProgress = {}): Promise<Image> {
    return image(await this.watched({ op: "pull_image", reference }, options));
  }

  /** The images that the gateway's host has, by name. */
  async listImages(options?: CallOptions): Promise<Image[]> {
    return dicts((await this.call({ op: "list_images" }, options)).images).map(image);
  }

  /** Forgets an image; returns the digests of the unused layers that were removed with it. */
  async removeImage(reference: string, options?: CallOptions): Promise<string[]> {
    return texts((await this.call({ op: "remove_image", reference }, options)).removed_layers);
  }

  /** Removes the layers that no image and no sandbox uses; returns their digests. */
  async pruneImages(options?: CallOptions): Promise<string[]> {
    return texts((await this.call({ op: "prune_images" }, options)).removed_layers);
  }

  // Secrets.

  /** Stores a secret, in place of an older one; no call ever returns its value. */
  async setSecret(name: string, value: string, options: SecretOptions = {}): Promise<SecretInfo> {
    return secret(await this.call({ op: "set_secret", ...this.secretPlace(name, options), value }, options));
  }

  /** The names of the caller's secrets, of all its tenants or of one. */
  async listSecrets(tenantId = "", options?: CallOptions): Promise<SecretInfo[]> {
    return dicts((await this.call({ op: "list_secrets", tenant: tenantId }, options)).secrets).map(secret);
  }

  /** Removes a secret, or one value of it; returns how many values were removed. */
  async deleteSecret(name: string, options: SecretOptions = {}): Promise<number> {
    return number((await this.call({ op: "delete_secret", ...this.secretPlace(name, options) }, options)).deleted);
  }

  private secretPlace(name: string, options: SecretOptions): Dict {
    return { name, key: options.key ?? "", tenant: options.tenantId || this.tenantId };
  }

  // The pool. Only an admin may use it.

  /** The ready sandboxes, for each template and runtime. */
  async pool(options?: CallOptions): Promise<PoolInfo[]> {
    return dicts((await this.call({ op: "pool" }, options)).pools).map(poolInfo);
  }

  /** Changes how many sandboxes are ready, until the gateway ends. */
  async setPool(options: SetPoolOptions): Promise<PoolInfo> {
    const { template: recipe = "", runtime = "", minReady, maxReady, wait = false } = options;
    const call = { op: "set_pool", template: recipe, runtime, wait, min: minReady, max: maxReady };
    const { pool } = await this.call(call, options);
    return poolInfo(isDict(pool) ? pool : {});
  }

  /** Replaces the ready sandboxes of a template, or all; returns how many there were. */
  async drainPool(templateName = "", options?: CallOptions): Promise<number> {
    return number((await this.call({ op: "drain_pool", template: templateName }, options)).drained);
  }

  // The gateway.

  /** Rows of the audit trail, oldest first; your own, if you are not an admin. */
  async audit(wanted: AuditFilter = {}): Promise<AuditRow[]> {
    return auditRows(await this.call(auditCall(wanted), wanted));
  }

  /** Checks that no row was changed or removed; `expect` is the head of an earlier check. */
  async verifyAudit(expect = "", options?: CallOptions): Promise<AuditCheck> {
    return auditCheck(await this.call({ op: "verify_audit", expect }, options));
  }

  /** The gateway's version, pid, sessions and addresses. */
  async status(options?: CallOptions): Promise<Readonly<Record<string, unknown>> & { readonly version: string }> {
    const told = await this.call({ op: "status" }, options);
    return { ...named(told), version: text(told.version) };
  }

  /** Which runtimes and features work on the gateway's host, and how to fix the others. */
  async doctor(options: CallOptions & { fresh?: boolean | undefined } = {}): Promise<Readonly<Record<string, unknown>>> {
    return named(await this.call({ op: "doctor", fresh: options.fresh ?? false }, options));
  }

  // Asking.

  private call(fields: Packable, options?: CallOptions): Promise<Dict> {
    return this.connections.call(fields, options);
  }

  /** Asks the gateway about a session. */
  private onSession(op: string, sessionId: string, options?: CallOptions, fields: Record<string, Packable> = {}): Promise<Dict> {
    return this.call({ op, session_id: sessionId, ...fields }, options);
  }

  /** Asks a session's guest. */
  private inSession(op: string, sessionId: string, options?: CallOptions): Promise<Dict> {
    return this.call({ op, session: commands.byId(sessionId) }, options);
  }

  /** Asks for something that reports progress. */
  private watched(call: Record<string, Packable>, options: SnapshotProgress): Promise<Dict> {
    const onData = (told: Dict): void => options.progress?.(number(told.bytes), number(told.total) || undefined);
    return this.connections.call({ ...call, progress: true }, options, onData);
  }

  private moving(options: CallOptions & { progress?: Progress | undefined }): {
    signal: AbortSignal | undefined;
    progress: Progress | undefined;
  } {
    return { signal: this.connections.limits(options), progress: options.progress };
  }
}

function withTimeout<Options extends { timeout?: number | undefined }>(options: TimeoutOr<Options>, usual: number): Options {
  const all = optionsOf(options);
  return all.timeout === undefined ? { ...all, timeout: usual } : all;
}

function readCall(sessionId: string, path: string, options: ReadOptions): Packable {
  return files.fileCall("read", sessionId, path, { offset: options.offset, length: options.length });
}

