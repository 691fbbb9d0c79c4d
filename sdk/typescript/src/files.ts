/**
 * Files of a sandbox, one at a time.
 *
 * @module
 */

import { byId } from "./commands.ts";
import { type CallOptions, checkError, type Connections } from "./connections.ts";
import { checkContent, type Content, feed, type Progress } from "./content.ts";
import { GuestFailed, LimitExceeded } from "./errors.ts";
import { fill, isDict, number } from "./records.ts";
import * as wire from "./wire.ts";

const DEPTH = 1000; // levels of folders that a listing goes down
const MOST_ENTRIES = 1 << 20; // of a listing

/** The types of files. */
export type FileType = "file" | "dir" | "link" | "fifo" | "socket" | "char" | "block" | "other";

/** A file of the sandbox. */
export interface FileEntry {
  readonly path: string;
  readonly type: FileType;
  readonly size: number;
  readonly mode: number;
  readonly modifiedNs: bigint;
  /** Seconds since 1970. */
  readonly modified: number;
  /** Where a link points to (only `stat` tells). */
  readonly target: string;
}

/** How a file is written. */
export interface WriteOptions extends CallOptions {
  /** Add to the file instead of replacing it. */
  append?: boolean | undefined;
  /** Permissions, such as `0o755`. */
  mode?: number | undefined;
  progress?: Progress | undefined;
}

/** The part of a file to read. */
export interface ReadOptions extends CallOptions {
  offset?: number | undefined;
  length?: number | undefined;
  progress?: Progress | undefined;
}

/** Options of a listing. */
export interface ListOptions extends CallOptions {
  path?: string | undefined;
  /** How many levels of folders to go down; 0 means all. */
  depth?: number | undefined;
  /** Whether folders are listed too. */
  directories?: boolean | undefined;
}

/** An operation on a file; fields that are undefined are left out. */
export function fileCall(op: string, sessionId: string, path: string, fields: Record<string, wire.Packable> = {}): wire.Packable {
  return { op, session: byId(sessionId), path, ...fields };
}

const ENTRY: Omit<FileEntry, "modified"> = { path: "", type: "other", size: 0, mode: 0, modifiedNs: 0n, target: "" };

export function entry(told: wire.Dict): FileEntry {
  const found = fill(ENTRY, told);
  return { ...found, modified: Number(found.modifiedNs / 1_000_000_000n) };
}

/** Writes a file; returns the number of bytes. */
export async function write(
  connections: Connections,
  call: wire.Packable,
  content: Content,
  options: { signal?: AbortSignal | undefined; progress?: Progress | undefined },
): Promise<number> {
  checkContent(content);
  const { lane } = await connections.begin(call, { own: true, signal: options.signal });
  let failure: unknown;
  const feeding = feed(lane, content, { kind: wire.DATA, end: wire.END, progress: options.progress }).catch((error: unknown) => {
    failure = error;
    lane.fail(new GuestFailed("what is written could not be read"));
  });
  try {
    for (;;) {
      const frame = await lane.receive();
      checkError(frame);
      if (frame.kind === wire.RESULT) {
        await feeding;
        connections.finish(lane);
        return number(wire.unpackDict(frame.body).size);
      }
    }
  } catch (error) {
    connections.abandon(lane); // so no file appears
    throw failure ?? error;
  }
}

/** A file, piece by piece, in constant memory. */
export async function* readChunks(
  connections: Connections,
  call: wire.Packable,
  options: { signal?: AbortSignal | undefined; progress?: Progress | undefined },
): AsyncGenerator<Uint8Array, void, void> {
  const { lane, told } = await connections.begin(call, { own: true, signal: options.signal });
  const total = toCome(told, call as wire.Dict);
  let done = 0;
  let finished = false;
  try {
    for (;;) {
      const frame = lane.poll();
      if (frame === undefined) {
        await lane.arrival();
      } else if (frame.kind === wire.DATA) {
        done += frame.body.length;
        options.progress?.(done, total);
        yield frame.body;
        lane.consume(frame.body.length);
      } else if (frame.kind === wire.END) {
        finished = true;
        return;
      } else {
        checkError(frame);
      }
    }
  } finally {
    if (finished) connections.finish(lane);
    else connections.abandon(lane);
  }
}

/** A file in one piece. */
export async function read(
  connections: Connections,
  call: wire.Packable,
  options: { signal?: AbortSignal | undefined; progress?: Progress | undefined },
): Promise<Uint8Array> {
  const { lane, told } = await connections.begin(call, { own: true, signal: options.signal });
  const total = toCome(told, call as wire.Dict);
  let whole = Buffer.allocUnsafeSlow(total ?? 0);
  let done = 0;
  lane.placeOf = (at, length) => (at + length <= whole.length ? whole.subarray(at, at + length) : undefined);
  try {
    for (;;) {
      const frame = lane.poll();
      if (frame === undefined) {
        await lane.arrival();
      } else if (frame.kind === wire.DATA) {
        const { body } = frame;
        const isThere = body.buffer === whole.buffer && body.byteOffset === whole.byteOffset + done;
        if (!isThere && done + body.length > whole.length) {
          const larger = Buffer.allocUnsafeSlow(Math.max(2 * whole.length, done + body.length));
          whole.copy(larger, 0, 0, done);
          whole = larger;
          lane.placeOf = undefined;
        }
        if (!isThere) body.copy(whole, done);
        done += body.length;
        options.progress?.(done, total);
        lane.consume(body.length);
      } else if (frame.kind === wire.END) {
        connections.finish(lane);
        return whole.subarray(0, done);
      } else {
        checkError(frame);
      }
    }
  } catch (error) {
    connections.abandon(lane);
    throw error;
  }
}

/** How much of a file will be read; files of the kernel do not know their size. */
function toCome(told: wire.Dict, call: wire.Dict): number | undefined {
  const size = number(told.size);
  if (size === 0) return undefined;
  const left = Math.max(0, size - (typeof call.offset === "number" ? call.offset : 0));
  return typeof call.length === "number" ? Math.min(left, call.length) : left;
}

/** A file as a web stream. */
export function stream(chunks: AsyncGenerator<Uint8Array, void, void>): ReadableStream<Uint8Array> {
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const next = await chunks.next();
        if (next.done === true) controller.close();
        else controller.enqueue(next.value);
      },
      async cancel() {
        await chunks.return();
      },
    },
    { highWaterMark: 0 },
  );
}

/** The entries of a folder. */
export async function list(
  connections: Connections,
  sessionId: string,
  since: number,
  options: ListOptions,
): Promise<FileEntry[]> {
  const call = fileCall("list", sessionId, options.path ?? "/workspace", {
    depth: options.depth || DEPTH,
    since_ns: BigInt(Math.trunc(since * 1000)) * 1_000_000n,
  });
  const { lane } = await connections.begin(call, { own: true, signal: connections.limits(options) });
  const found: FileEntry[] = [];
  try {
    for (;;) {
      const frame = await lane.receive();
      if (frame.kind === wire.DATA) {
        const entries = wire.unpack(frame.body);
        if (Array.isArray(entries)) found.push(...entries.filter(isDict).map(entry));
        if (found.length > MOST_ENTRIES) {
          throw new LimitExceeded(`there are more than ${MOST_ENTRIES} files`, { hint: "list the folders in it one by one" });
        }
        lane.consume(frame.body.length);
      } else if (frame.kind === wire.END) {
        connections.finish(lane);
        return options.directories === true ? found : found.filter((item) => item.type !== "dir");
      } else {
        checkError(frame);
      }
    }
  } catch (error) {
    connections.abandon(lane);
    throw error;
  }
}
