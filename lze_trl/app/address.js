// The run, tab, prompt and search stand in the address, so that a page can be loaded again, or sent
let asked = new URL(location).searchParams.get("tab");
watch("value", () => {
  const url = new URL(location);
  for (const [name, value] of Object.entries(JSON.parse(props.value || "{}")))
    value ? url.searchParams.set(name, value) : url.searchParams.delete(name);
  history.replaceState(history.state, "", url);
  for (const tab of document.querySelectorAll("#lze-tabs [role=tab]")) if (tab.innerText.trim() === asked) tab.click();
  asked = null;
});
