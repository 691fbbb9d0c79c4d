// Drives our server with the official TypeScript client; prints what it found as JSON.
//     node client.mjs stdio COMMAND ARG...
//     node client.mjs http URL TOKEN
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ElicitRequestSchema } from "@modelcontextprotocol/sdk/types.js";

const [way, ...rest] = process.argv.slice(2);
const transport =
  way === "stdio"
    ? new StdioClientTransport({ command: rest[0], args: rest.slice(1), env: process.env })
    : new StreamableHTTPClientTransport(new URL(rest[0]), {
        requestInit: { headers: { authorization: `Bearer ${rest[1]}` } },
      });
const client = new Client({ name: "test", version: "1" }, { capabilities: { elicitation: {} } });
client.setRequestHandler(ElicitRequestSchema, async () => ({
  action: "accept",
  content: { approve: true, reason: "typed" },
}));
await client.connect(transport);
const call = async (name, args, options) =>
  (await client.callTool({ name, arguments: args }, undefined, options)).structuredContent;

const found = { server: client.getServerVersion().name };
found.tools = (await client.listTools()).tools.length;
found.run = await call("sandbox_run", { code: "print(6 * 7)", language: "python" });
found.unknown = (await client.callTool({ name: "sandbox_rn", arguments: {} })).isError;
await call("sandbox_write_file", { path: "a.txt", content: "héllo" });
const uri = (await client.listResources()).resources[0].uri;
found.resource = (await client.readResource({ uri })).contents[0].text;
found.approval = await call("sandbox_confirm_action", { action: "drop" });

const heard = [];
const begun = new AbortController();
const running = call(
  "sandbox_run",
  { code: "echo begun; sleep 96", timeout: 90 },
  {
    signal: begun.signal,
    onprogress: (told) => {
      heard.push(told.message);
      begun.abort("enough");
    },
  },
);
found.cancelled = await running.then(() => false, () => true);
found.heard = heard[0];
found.left = (await call("sandbox_exec", { command: "for n in $(seq 100); do pgrep -f 'sleep 9[6]' >/dev/null || exit 7; sleep 0.1; done" })).exit_code;
console.log(JSON.stringify(found));
if (way === "http") await transport.terminateSession();
await client.close();
