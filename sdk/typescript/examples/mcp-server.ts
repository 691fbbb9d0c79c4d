/** An MCP server with one tool that runs code in a sandbox: the official SDK, on stdin and stdout. */

import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { SandboxClient } from "k8e";
import { z } from "zod";

const client = new SandboxClient();
const server = new McpServer({ name: "sandbox", version: "1.0.0" });
server.registerTool("run_python", { inputSchema: { code: z.string() } }, async ({ code }, { signal }) => {
  const { stdout, stderr, exitCode } = await client.run(code, "python", { signal });
  return { content: [{ type: "text", text: stdout + stderr }], isError: exitCode !== 0 };
});
server.server.onclose = () => void client.close();
await server.connect(new StdioServerTransport());
process.stdin.once("end", () => void server.close());
