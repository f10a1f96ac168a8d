// Draws figures in a grid. `gr.Plot` draws a chart anew at each change, so that it flickers and forgets the reader's zoom
const draw = () => {
  if (!window.Plotly) return setTimeout(draw, 50);
  const grid = element.querySelector(".lze-grid"), figures = JSON.parse(props.value || "[]");
  const before = grid.children.length;
  for (let place = before; place > figures.length; place--) { Plotly.purge(grid.lastChild); grid.lastChild.remove(); }
  for (let place = before; place < figures.length; place++) grid.insertAdjacentHTML("beforeend", '<div class="lze-chart"></div>');
  figures.forEach(({data, layout}, place) => {
    const chart = grid.children[place], isNew = !chart.data;
    Plotly.react(chart, data, layout, {responsive: true, displaylogo: false});
    if (isNew) chart.on("plotly_click", ({points: [{customdata}]}) => customdata && trigger("click", {row: customdata}));
    else if (before !== figures.length) Plotly.Plots.resize(chart);
  });
};
watch("value", draw);
draw();
