/** Calls the tool of `mcp-server.ts`, as an agent does. */

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";

const [command = "", ...args] = process.argv.slice(2);
const client = new Client({ name: "example", version: "1.0.0" });
const env = Object.fromEntries(Object.entries(process.env).flatMap(([name, value]) => (value === undefined ? [] : [[name, value]])));
await client.connect(new StdioClientTransport({ command, args, env }));
const found = await client.callTool({ name: "run_python", arguments: { code: "print(6 * 7)" } });
console.log(JSON.stringify(found.content));
await client.close();
