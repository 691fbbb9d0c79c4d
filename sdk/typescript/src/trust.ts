/**
 * Certificates of gateways where K8E keeps them, in the order in which its clients look: files of this
 * machine, then kubeconfigs. Of a kubeconfig, only the cluster counts whose server is the host that is called: the CA
 * of another cluster must not be trusted for this host.
 *
 * @module
 */

import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { delimiter, dirname, resolve } from "node:path";

const MAX_FILE = 1 << 20;
const CERTIFICATE = /-----BEGIN CERTIFICATE-----[\s\S]+?-----END CERTIFICATE-----/g;
const FILES = [
  "/var/lib/k8e/server/tls/sandbox-ca.crt",
  "/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
  "/etc/k8e/tls/serving-kube-apiserver.crt",
];
const KUBECONFIGS = ["/etc/k8e/k8e.yaml", "/var/lib/k8e/server/cred/admin.kubeconfig"];

/** The certificate to trust for a host; undefined if no place has one. */
export async function find(host: string, isThisMachine: (host: string) => boolean): Promise<Buffer | undefined> {
  const isLocal = isThisMachine(host);
  for (const path of isLocal ? FILES : []) {
    const found = certificates(read(path));
    if (found !== undefined) return found;
  }
  for (const path of kubeconfigs()) {
    for (const cluster of await clusters(path)) {
      if ((cluster.host === host || (isLocal && isThisMachine(cluster.host))) && cluster.ca !== undefined) return cluster.ca;
    }
  }
  return undefined;
}

function kubeconfigs(): string[] {
  const named = (process.env.KUBECONFIG ?? "").split(delimiter).filter((item) => item !== "");
  const home = process.env.HOME || homedir();
  return [...named, "~/.kube/config", ...KUBECONFIGS].map((path) => path.replace(/^~(?=\/)/, home));
}

interface Cluster {
  readonly host: string;
  readonly ca: Buffer | undefined;
}

/** The clusters of a kubeconfig: the host of each and its CA. */
async function clusters(path: string): Promise<Cluster[]> {
  const text = read(path);
  if (!text.includes("clusters")) return [];
  const { parse } = await import("yaml");
  const found: Cluster[] = [];
  try {
    const config = parse(text, { maxAliasCount: 100 }) as { clusters: { cluster: Record<string, unknown> }[] };
    for (const { cluster } of config.clusters) {
      const host = new URL(String(cluster.server)).hostname.replace(/^\[|\]$/g, "");
      const data = cluster["certificate-authority-data"];
      const file = cluster["certificate-authority"];
      if (typeof data === "string") found.push({ host, ca: certificates(Buffer.from(data, "base64").toString("latin1")) });
      else if (typeof file === "string") found.push({ host, ca: certificates(read(resolve(dirname(path), file))) });
    }
  } catch {
    // It is not a kubeconfig; the clusters found before it count.
  }
  return found;
}

/** The certificates of a PEM file, whatever else is in it. */
function certificates(text: string): Buffer | undefined {
  const found = text.match(CERTIFICATE);
  return found === null ? undefined : Buffer.from(found.map((item) => `${item}\n`).join(""), "latin1");
}

function read(path: string): string {
  try {
    return readFileSync(path, "latin1").slice(0, MAX_FILE);
  } catch {
    return "";
  }
}
