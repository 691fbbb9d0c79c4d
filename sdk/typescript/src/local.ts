/**
 * The way to the gateway of this machine: its unix socket.
 *
 * @module
 */

import { lstatSync } from "node:fs";
import { createConnection, type Socket } from "node:net";
import { dirname, join } from "node:path";

import { Connection, nonsense, type Pipe, type PipeListener } from "./connection.ts";
import { GatewayUnreachable, type K8eError, NoGateway } from "./errors.ts";
import { header, MAX_REQUEST, Splitter } from "./wire.ts";

const READ_BYTES = 512 << 10;
const SMALL = 16 << 10;

/** No gateway listens on the socket, so one has to be started. */
export class NobodyListens extends Error {}

/** Our uid; -1 on systems without uids. */
export function uid(): number {
  return process.geteuid?.() ?? -1;
}

/** The gateway's socket, unless a configuration file says otherwise. */
export function defaultSocket(environ: NodeJS.ProcessEnv = process.env): string {
  let folder = environ.K8E_RUN_DIR;
  if (!folder) {
    folder = uid() === 0 ? "/run/k8e" : join(environ.XDG_RUNTIME_DIR || `/tmp/k8e-${uid()}`, "k8e");
  }
  return join(folder, "gateway.sock");
}

/** A connection to the gateway at a socket; {@link NobodyListens} where there is none. */
export function connect(path: string): Promise<Connection> {
  if (process.platform !== "linux") {
    throw new GatewayUnreachable("this host cannot run sandboxes: that needs Linux", {
      hint: "set K8E_SANDBOX_ENDPOINT to a gateway elsewhere, or log in to one: k8e sandbox login",
    });
  }
  checkOwner(path);
  return new Promise((resolve, reject) => {
    const connection = new Connection();
    const splitter = new Splitter(MAX_REQUEST, connection.frame, connection.placeOf);
    const take = (count: number, buffer: Uint8Array): boolean => {
      try {
        splitter.feed(buffer.subarray(0, count) as Buffer);
        return true;
      } catch (error) {
        connection.closed(nonsense(error), false);
        return false;
      }
    };
    const buffer = Buffer.allocUnsafeSlow(READ_BYTES);
    const socket = createConnection({ path, onread: { buffer, callback: take } });
    socket.once("error", (error: NodeJS.ErrnoException) => {
      reject(refusal(path, error));
    });
    socket.once("connect", () => {
      socket.removeAllListeners("error");
      resolve(connection.attach(new SocketPipe(socket, connection)));
    });
  });
}

function refusal(path: string, error: NodeJS.ErrnoException): Error {
  if (error.code === "ENOENT" || error.code === "ECONNREFUSED") return new NobodyListens();
  return new GatewayUnreachable(`the gateway's socket ${path} cannot be used: ${error.message}`, {
    cause: error,
    hint: "k8e status shows the gateway's state; K8E_RUN_DIR names the folder of its socket",
  });
}

/** Refuses a socket that another user put where ours should be. */
function checkOwner(path: string): void {
  const folder = dirname(path);
  for (const place of [folder, path]) {
    let owner: number;
    try {
      owner = lstatSync(place).uid;
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      if (code === "ENOENT" || code === "ENOTDIR") throw new NobodyListens();
      throw refusal(path, error as NodeJS.ErrnoException);
    }
    if (owner !== 0 && owner !== uid()) {
      throw new GatewayUnreachable(`the gateway's socket ${place} belongs to uid ${owner}, not to this user`, {
        hint: "set K8E_RUN_DIR to a folder that only you can write to",
      });
    }
  }
}

class SocketPipe implements Pipe {
  private readonly socket: Socket;
  private corked = false;

  constructor(socket: Socket, listener: PipeListener) {
    this.socket = socket;
    let reset = false;
    socket.on("error", (error: NodeJS.ErrnoException) => {
      reset ||= error.code === "ECONNRESET";
    });
    socket.on("end", () => socket.destroy());
    socket.on("close", () => {
      listener.closed(undefined, reset);
    });
  }

  send(kind: number, channel: number, body: Uint8Array, onFailure: () => void): void {
    const { socket } = this;
    if (!this.corked) {
      this.corked = true;
      socket.cork(); // what is said in one turn of the loop goes together
      process.nextTick(this.uncork);
    }
    const done = (error?: Error | null): void => {
      if (error) onFailure();
    };
    const head = header(body.length, kind, channel);
    if (body.length > 0 && body.length < SMALL) {
      socket.write(Buffer.concat([head, body]), done);
    } else {
      if (body.length > 0) socket.write(head);
      socket.write(body.length > 0 ? body : head, done);
    }
  }

  private readonly uncork = (): void => {
    this.corked = false;
    this.socket.uncork();
  };

  hold(needed: boolean): void {
    if (needed) this.socket.ref();
    else this.socket.unref();
  }

  close(): void {
    this.socket.destroySoon();
  }
}

/** The error for a named endpoint where no gateway listens. */
export function nobodyListens(path: string): K8eError {
  return new NoGateway(`no gateway listens on ${path}`, {
    hint: "start it there, or unset K8E_SANDBOX_ENDPOINT to use this host's own",
  });
}
