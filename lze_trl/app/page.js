// Keeps the address in step with the controls, shows values under the pointer, zooms charts and saves them as CSV.
(() => {
  const { defaults, shown } = ADDRESS;

  window.lzeWriteAddress = (values) => {
    const address = new URL(window.location);
    Object.keys(defaults).forEach((name, i) => {
      const value = Array.isArray(values[i]) ? values[i].join(",") : values[i];
      if (!shown[values[0]].includes(name) || value === null || value === undefined || value === defaults[name]) address.searchParams.delete(name);
      else address.searchParams.set(name, value);
    });
    window.history.replaceState(null, "", address);
    return values;
  };

  const short = (value, percent) => {
    if (value === null) return "–";
    if (percent) return (100 * value).toFixed(1) + " %";
    return Math.abs(value) >= 1e6 ? value.toExponential(2) : String(+value.toPrecision(4));
  };

  const clear = (plot) => plot.querySelectorAll(".lze-tip, .lze-rule").forEach((node) => node.remove());

  const rule = (plot, left, width) => {
    const node = document.createElement("div");
    node.className = "lze-rule";
    node.style.left = left + "%";
    if (width) node.style.width = width + "%";
    plot.append(node);
  };

  // Horizontal place of the pointer in a plot, from 0 to 1
  const share = (plot, x) => {
    const box = plot.getBoundingClientRect();
    return Math.min(Math.max((x - box.left) / box.width, 0), 1);
  };

  let pointer = null, drag = null;
  const show = () => {
    const under = document.elementFromPoint(...pointer);
    const plot = under ? under.closest("[data-lze]") : null;
    document.querySelectorAll("[data-lze]").forEach((other) => other !== plot && clear(other));
    if (!plot) return;
    const data = JSON.parse(plot.dataset.lze);
    const at = data.low + share(plot, pointer[0]) * (data.high - data.low);
    let where = null, first = null;
    const lines = data.lines.filter((line) => line.x.length).map((line) => {
      let best = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.x[best] - at)) best = i; });
      if (where === null || Math.abs(line.x[best] - at) < Math.abs(where - at)) where = line.x[best];
      const value = line.y[best], distance = first === null || value === null ? null : value - first;
      first ??= value;
      const compared = data.compared && distance !== null ? `  (${distance < 0 ? "" : "+"}${short(distance, data.percent)})` : "";
      return line.name + "  " + short(value, data.percent) + compared;
    });
    clear(plot);
    if (where === null) return;
    const left = (100 * (where - data.low)) / (data.high - data.low);
    rule(plot, left);
    if (drag) rule(plot, 100 * Math.min(drag, share(plot, pointer[0])), 100 * Math.abs(share(plot, pointer[0]) - drag));
    const tip = document.createElement("div");
    tip.className = "lze-tip";
    tip.textContent = [short(where, false), ...lines].join("\n");
    if (left > 50) tip.style.right = 100 - left + 1 + "%"; else tip.style.left = left + 1 + "%";
    plot.append(tip);
  };

  const zoom = (plot, span) => plot.dispatchEvent(new CustomEvent("lze-set", { bubbles: true, detail: { zoom: span } }));
  const zoomed = (event) => event.target.closest(".lze-zoom [data-lze]");

  document.addEventListener("pointerdown", (event) => {
    const plot = event.button === 0 && zoomed(event);
    drag = plot ? share(plot, event.clientX) : null;
  });
  document.addEventListener("pointerup", (event) => {
    const plot = zoomed(event), start = drag;
    drag = null;
    if (!plot || start === null || Math.abs(share(plot, event.clientX) - start) < 0.02) return;
    const { low, high } = JSON.parse(plot.dataset.lze);
    const ends = [start, share(plot, event.clientX)].map((place) => +(low + place * (high - low)).toPrecision(6));
    zoom(plot, ends.sort((a, b) => a - b).join(","));
  });
  document.addEventListener("dblclick", (event) => { if (zoomed(event)) zoom(zoomed(event), ""); });

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-csv]");
    if (!button) return;
    const figure = button.closest("figure");
    const { lines } = JSON.parse(figure.querySelector("[data-lze]").dataset.lze);
    const head = ["line", figure.querySelector(".lze-x-label").innerText, button.dataset.csv];
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const rows = lines.flatMap((line) => line.x.map((x, i) => [quoted(line.name), x, line.y[i] ?? ""].join(",")));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[head.map(quoted).join(","), ...rows].join("\n") + "\n"], { type: "text/csv" }));
    link.download = button.dataset.csv + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  document.addEventListener("pointermove", (event) => { pointer = [event.clientX, event.clientY]; show(); });
  // A refresh takes away what the page does not know: it is shown again, with the values of now
  const refreshed = new MutationObserver(() => { if (pointer) show(); refreshed.takeRecords(); });
  refreshed.observe(document, { childList: true, subtree: true });
})();
