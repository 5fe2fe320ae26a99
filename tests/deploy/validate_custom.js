// Validates custom resources, a JSON list on stdin, by the types of their projects (npm's @kubernetes-models, found by
// NODE_PATH). Prints a JSON list with one list of complaints for each.
//
// A validator takes unknown fields, as an API server does when it prunes them. It looks at every field it knows, so a
// field that it never looks at, in an object where it looks for others, is unknown.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { pathToFileURL } = require("node:url");

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

function watched(value, where, visited) {
  const seen = new Set();
  if (!Array.isArray(value)) visited.push({ value, where, seen });
  return new Proxy(value, {
    get(target, key) {
      seen.add(key);
      const field = target[key];
      const isObject = typeof field === "object" && field !== null;
      return isObject && Object.hasOwn(target, key) ? watched(field, `${where}/${key}`, visited) : field;
    },
  });
}

async function complaints(object) {
  const [group, version] = object.apiVersion.split("/");
  if (!(group in PACKAGES)) return [`no types for ${object.apiVersion}`];
  const parts = ["@kubernetes-models", PACKAGES[group], group, version, `${object.kind}.js`];
  const file = require.resolve
    .paths("@kubernetes-models/base")
    .map((folder) => path.join(folder, ...parts))
    .find((candidate) => fs.existsSync(candidate));
  if (file === undefined) return [`no types for ${object.kind} of ${object.apiVersion}`];
  const model = (await import(pathToFileURL(file)))[object.kind];
  const visited = [];
  try {
    model.prototype.validate.call(watched(object, "", visited));
  } catch (error) {
    return [error.message];
  }
  return visited
    .filter(({ seen }) => seen.size > 0)
    .flatMap(({ value, where, seen }) =>
      Object.keys(value).filter((key) => !seen.has(key)).map((key) => `${where}/${key} is no field`));
}

async function main() {
  const objects = JSON.parse(fs.readFileSync(0, "utf8"));
  const answers = [];
  for (const object of objects) answers.push(await complaints(object));
  process.stdout.write(JSON.stringify(answers));
}

main();
