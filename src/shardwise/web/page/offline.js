// Keeps the files of VERSION, so that the planner opens without a network.
const NAME = "shardwise-planner";

async function keep() {
  const cache = await caches.open(`${NAME}-${VERSION}`);
  const { files } = await (await fetch("files.json", { cache: "no-cache" })).json();
  await Promise.all(["./", "files.json", ...files.map((file) => file.url)].map((url) => cache.add(url)));
  const old = (await caches.keys()).filter((name) => name.startsWith(NAME) && name !== `${NAME}-${VERSION}`);
  await Promise.all(old.map((name) => caches.delete(name)));
}

self.addEventListener("install", (event) => event.waitUntil(keep().then(() => self.skipWaiting())));
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
// The network first where it is there, so that a new version is seen; else what was kept.
self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  const page = event.request.mode === "navigate" || event.request.url.endsWith("files.json");
  const kept = () => caches.match(event.request, { ignoreSearch: true });
  event.respondWith(page
    ? fetch(event.request).catch(async () => (await kept()) ?? Response.error())
    : kept().then((found) => found ?? fetch(event.request)));
});
