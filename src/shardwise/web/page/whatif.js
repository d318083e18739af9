// Sliders: what if the network, the memory, the number of devices or the length were different?

const POWERS = (low, high) => Array.from({ length: high - low + 1 }, (_, n) => 2 ** (low + n));
const QUANTITIES = {
  network: { title: "Network per device", unit: " Gbps", values: [10, 25, 50, 100, 200, 400, 800, 1600, 3200] },
  memory: { title: "Memory of a device", unit: " GiB", values: [16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288] },
  devices: { title: "Devices", unit: "", values: [] },
  "seq-len": { title: "Sequence length", unit: " tokens", values: POWERS(9, 20) },
};
const CURVE_POINTS = 5;

function valuesOf(name, at) {
  const { values } = QUANTITIES[name];
  const around = name === "devices"
    ? [1, 2, 4, ...POWERS(0, 14).map((n) => n * at.node), at.devices]
    : [...values, at[name]];
  // One node grows only where there is a network to the next.
  const most = at.network === undefined ? at.node : 64 * at.devices;
  const near = name === "devices" ? around.filter((n) => n <= most) : around;
  return [...new Set(near)].sort((a, b) => a - b);
}

// A few values around the present one, for a curve.
function curveValues(values, now) {
  const at = values.indexOf(now), from = Math.max(0, Math.min(at - 2, values.length - CURVE_POINTS));
  return values.slice(from, from + CURVE_POINTS);
}

// `moved` is called while a slider moves, `rested` when it is let go; both with the changes.
export function drawSliders(place, at, { moved, rested, curve }) {
  const change = {};
  place.replaceChildren();
  for (const [name, { title, unit }] of Object.entries(QUANTITIES)) {
    if (at[name] === undefined) continue;
    const values = valuesOf(name, at), now = values.indexOf(at[name]);
    const row = document.createElement("div"), left = document.createElement("div"), drawn = document.createElement("div");
    const label = document.createElement("label"), shown = document.createElement("output"), input = document.createElement("input");
    row.className = "slider";
    drawn.className = "curve";
    Object.assign(input, { type: "range", min: 0, max: values.length - 1, value: now, id: `slider-${name}` });
    label.htmlFor = shown.htmlFor = input.id;
    label.textContent = title;
    const text = () => `${values[input.value].toLocaleString("en")}${unit}`;
    const tell = () => {
      shown.textContent = text() + (Number(input.value) === now ? "" : ` instead of ${at[name].toLocaleString("en")}`);
      input.setAttribute("aria-valuetext", text());
      if (Number(input.value) === now) delete change[name]; else change[name] = String(values[input.value]);
    };
    input.addEventListener("input", () => { tell(); moved({ ...change }); });
    input.addEventListener("change", () => rested({ ...change }));
    tell();
    left.append(label, input, shown);
    row.append(left, drawn);
    place.append(row);
    // A curve is searched for when somebody sees its place.
    new IntersectionObserver(async (seen, observer) => {
      if (!seen.some((one) => one.isIntersecting)) return;
      observer.disconnect();
      drawn.innerHTML = await curve(name, curveValues(values, at[name]).map(String));
    }).observe(drawn);
  }
}
