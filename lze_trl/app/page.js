// Keeps the address in step with the controls, and shows values under the pointer.
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

  let pointer = null;
  const show = () => {
    const under = document.elementFromPoint(...pointer);
    const plot = under ? under.closest("[data-lze]") : null;
    document.querySelectorAll("[data-lze]").forEach((other) => other !== plot && clear(other));
    if (!plot) return;
    const data = JSON.parse(plot.dataset.lze);
    const box = plot.getBoundingClientRect();
    const share = Math.min(Math.max((pointer[0] - box.left) / box.width, 0), 1);
    const at = data.low + share * (data.high - data.low);
    let where = null;
    const lines = data.lines.filter((line) => line.x.length).map((line) => {
      let best = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(line.x[best] - at)) best = i; });
      if (where === null || Math.abs(line.x[best] - at) < Math.abs(where - at)) where = line.x[best];
      return line.name + "  " + short(line.y[best], data.percent);
    });
    clear(plot);
    const rule = document.createElement("div");
    rule.className = "lze-rule";
    const left = (100 * (where - data.low)) / (data.high - data.low);
    rule.style.left = left + "%";
    const tip = document.createElement("div");
    tip.className = "lze-tip";
    tip.textContent = [short(where, false), ...lines].join("\n");
    if (left > 50) tip.style.right = 100 - left + 1 + "%"; else tip.style.left = left + 1 + "%";
    plot.append(rule, tip);
  };

  document.addEventListener("pointermove", (event) => { pointer = [event.clientX, event.clientY]; show(); });
  // A refresh takes away what the page does not know: it is shown again, with the values of now
  const refreshed = new MutationObserver(() => { if (pointer) show(); refreshed.takeRecords(); });
  refreshed.observe(document, { childList: true, subtree: true });
})();
