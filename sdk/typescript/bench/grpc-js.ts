/** The same calls by `@grpc/grpc-js`, as far as the benchmark needs them: what our own way is measured against. */

import { readFileSync } from "node:fs";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { Client, type ClientDuplexStream, credentials } from "@grpc/grpc-js";

import { type RunFrame, RunFrameSchema } from "../src/generated/sandbox_pb.ts";
import * as wire from "../src/wire.ts";

const MAX_MESSAGE = 64 << 20;

/** One `Run` call, for one operation at a time. */
export class GrpcJs {
  private readonly client: Client;
  private readonly stream: ClientDuplexStream<RunFrame, RunFrame>;
  private channel = 0;
  private onFrame: (kind: number, body: Uint8Array) => void = () => undefined;

  constructor(target: string, ca: string) {
    this.client = new Client(target, credentials.createSsl(readFileSync(ca)), {
      "grpc.max_receive_message_length": MAX_MESSAGE,
      "grpc.max_send_message_length": MAX_MESSAGE,
    });
    this.stream = this.client.makeBidiStreamRequest(
      "/sandbox.v1.SandboxService/Run",
      (frame: RunFrame) => Buffer.from(toBinary(RunFrameSchema, frame)),
      (bytes: Buffer) => fromBinary(RunFrameSchema, bytes),
    );
    this.stream.on("error", () => undefined);
    this.stream.on("data", (frame: RunFrame) => {
      for (const one of [frame, ...frame.rest]) if (one.channel === this.channel) this.onFrame(one.kind, one.body);
    });
  }

  private send(kind: number, body: Uint8Array): void {
    this.stream.write(create(RunFrameSchema, { kind, channel: this.channel, body: body }));
  }

  private run(call: wire.Packable, end: number): Promise<number> {
    this.channel += 1;
    let count = 0;
    return new Promise((resolve, reject) => {
      this.onFrame = (kind, body) => {
        if (kind === end) resolve(count);
        else if (kind === wire.ERROR) reject(new Error("the gateway refused the call"));
        else if (kind === wire.DATA) {
          count += body.length;
          this.send(wire.CREDIT, wire.creditBody(body.length));
        }
      };
      this.send(wire.CALL, wire.pack(call));
    });
  }

  exec(sessionId: string, argv: readonly string[]): Promise<number> {
    const id = crypto.randomUUID();
    return this.run({ op: "exec", session: { id: sessionId }, id, argv, timeout: 30, limit: 1 << 20 }, wire.EXIT);
  }

  read(sessionId: string, path: string): Promise<number> {
    return this.run({ op: "read", session: { id: sessionId }, path }, wire.END);
  }

  close(): void {
    this.client.close();
  }
}
