// A click on a heading sorts, one anywhere on a row opens it; so does the Enter key, and arrows move between rows
const act = ({target}) => {
  const copied = target.closest("[data-copy]"), explained = target.closest("[title]");
  if (target.dataset.tick) return trigger("input", {run: target.dataset.tick, ticked: target.checked});
  if (explained && matchMedia("(hover: none)").matches) {  // a finger cannot rest on a word
    document.querySelector(".lze-told")?.remove();
    const told = Object.assign(document.createElement("p"), {className: "lze-told", textContent: explained.title});
    told.onclick = () => told.remove();
    document.body.append(told);
  }
  if (copied) return navigator.clipboard?.writeText(copied.dataset.copy);
  const heading = target.closest("th[data-sort]"), row = target.closest("[data-row]");
  if (heading) { held = false; trigger("select", {...heading.dataset}); }
  else if (row) {
    trigger("click", {...row.dataset});
    if (innerWidth < 700) document.querySelector("#lze-detail")?.scrollIntoView({behavior: "smooth"});
  }
};
// Small charts within a text
const draw = () => {
  if (!window.Plotly) return setTimeout(draw, 50);
  for (const place of element.querySelectorAll("[data-figure]:empty")) {
    const {data, layout} = JSON.parse(place.dataset.figure);
    Plotly.newPlot(place, data, layout, {responsive: true, displaylogo: false, staticPlot: !layout.showlegend});
  }
};
watch("value", () => requestAnimationFrame(draw));
draw();
element.addEventListener("click", act);
// While the pointer is over its rows, they keep their places
let held = false;
element.addEventListener("mouseover", ({target}) => {
  if (held || !target.closest("tr[data-row]")) return;
  held = true;
  trigger("focus", {rows: [...element.querySelectorAll("tr[data-row]")].map((row) => row.dataset.row)});
});
element.addEventListener("mouseleave", () => { held = false; trigger("blur", {rows: []}); });
element.addEventListener("keydown", (event) => {
  const step = {ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling"}[event.key];
  if (event.key === "Enter" && !event.target.matches("button")) act(event);
  else if (step && event.target.matches("tr[data-row]")) { event.preventDefault(); event.target[step]?.focus(); }
});
