// Sliders: what if the network, the memory, the number of devices or the length were different?

const POWERS = (low, high) => Array.from({ length: high - low + 1 }, (_, n) => 2 ** (low + n));
const QUANTITIES = {
  network: { title: "Network per device", unit: " Gbps", values: [10, 25, 50, 100, 200, 400, 800, 1600, 3200] },
  memory: { title: "Nominal memory of a device", unit: " GiB", values: [16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288] },
  devices: { title: "Devices", unit: "", values: [] },
  "seq-len": { title: "Sequence length", unit: " tokens", values: POWERS(9, 20) },
};
const CURVE_POINTS = 5;
// The first use of the browser's own number formats blocks the page for a while.
const grouped = (number) => String(number).replace(/\B(?<!\.\d*)(?=(\d{3})+(?!\d))/g, ",");

function valuesOf(name, at, moved) {
  const { values } = QUANTITIES[name];
  const around = name === "devices"
    ? [1, 2, 4, ...POWERS(0, 14).map((n) => n * at.node), at.devices]
    : [...values, at[name]];
  const near = name === "devices" ? around.filter((n) => n <= at.most) : around;
  // An address may hold any value.
  return [...new Set(moved === undefined ? near : [...near, Number(moved)])].sort((a, b) => a - b);
}

// A few values around the present one, for a curve.
function curveValues(values, now) {
  const at = values.indexOf(now), from = Math.max(0, Math.min(at - 2, values.length - CURVE_POINTS));
  return values.slice(from, from + CURVE_POINTS);
}

// `moved` is called while a slider moves, `rested` when it is let go; both with the changes.
// `change` is what they begin with, away from `at`.
// Each curve has its own place below.
export function drawSliders(place, curves, at, change, { moved, rested, curve }) {
  const back = document.createElement("button");
  Object.assign(back, { type: "button", className: "copy", textContent: "Back to the cluster asked for" });
  const resets = [];
  back.addEventListener("click", () => {
    for (const name of Object.keys(change)) delete change[name];
    for (const reset of resets) reset();
    rested({});
  });
  const offer = () => { back.hidden = Object.keys(change).length === 0; };
  place.replaceChildren();
  curves.replaceChildren();
  for (const [name, { title, unit }] of Object.entries(QUANTITIES)) {
    if (at[name] === undefined) continue;
    const values = valuesOf(name, at, change[name]), now = values.indexOf(at[name]);
    const begin = name in change ? values.indexOf(Number(change[name])) : now;
    const row = document.createElement("div"), drawn = document.createElement("div");
    const label = document.createElement("label"), shown = document.createElement("output"), input = document.createElement("input");
    row.className = "slider";
    drawn.className = "curve";
    Object.assign(input, { type: "range", min: 0, max: values.length - 1, value: begin, id: `slider-${name}` });
    label.htmlFor = shown.htmlFor = input.id;
    label.textContent = title;
    const text = () => `${grouped(values[input.value])}${unit}`;
    const tell = () => {
      shown.textContent = text() + (Number(input.value) === now ? "" : ` instead of ${grouped(at[name])}`);
      input.setAttribute("aria-valuetext", text());
      if (Number(input.value) === now) delete change[name]; else change[name] = String(values[input.value]);
      offer();
    };
    input.addEventListener("input", () => { tell(); moved({ ...change }); });
    input.addEventListener("change", () => rested({ ...change }));
    resets.push(() => { input.value = now; tell(); });
    tell();
    row.append(label, input, shown);
    place.append(row);
    curves.append(drawn);
    // A curve is searched for when somebody sees its place.
    new IntersectionObserver(async (seen, observer) => {
      if (!seen.some((one) => one.isIntersecting)) return;
      observer.disconnect();
      drawn.innerHTML = await curve(name, curveValues(values, at[name]).map(String));
    }).observe(drawn);
  }
  place.append(back);
}
