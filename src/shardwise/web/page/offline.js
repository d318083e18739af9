// Keeps the files of VERSION, so that the planner opens without a network.
const NAME = "shardwise-planner", KEPT = `${NAME}-${VERSION}`;
// Always what the server has: what a browser keeps without asking may be of an older version.
const current = (request) => fetch(request, { cache: "no-cache" });

async function keep() {
  const { version, files } = await (await current("files.json")).json();
  if (version !== VERSION) throw new Error("The site is being replaced."); // the browser tries again
  const cache = await caches.open(KEPT);
  await Promise.all(["./", "files.json", ...files.map((file) => file.url)].map(async (url) => {
    const response = await current(url);
    if (!response.ok) throw new Error(`${url}: the server answered ${response.status}`);
    await cache.put(url, response);
  }));
}

async function forgetOthers() {
  const others = (await caches.keys()).filter((name) => name.startsWith(NAME) && name !== KEPT);
  await Promise.all(others.map((name) => caches.delete(name)));
}

async function kept(request) {
  const cache = await caches.open(KEPT);
  return await cache.match(request, { ignoreSearch: true }) ?? Response.error();
}

self.addEventListener("install", (event) => event.waitUntil(keep().then(() => self.skipWaiting())));
self.addEventListener("activate", (event) => event.waitUntil(forgetOthers().then(() => self.clients.claim())));
// The network where it is there, so that all files are of one version; else what was kept.
self.addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(current(event.request).catch(() => kept(event.request)));
});
