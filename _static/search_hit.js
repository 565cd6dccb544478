// Who comes from the search sees the place that was found, not the top of the page.
window.addEventListener("load", () => setTimeout(() => {
  if (location.hash) return;
  const shown = (word) => !word.closest("summary, nav, .headerlink");
  const hit = [...document.querySelectorAll("main .highlighted")].find(shown);
  if (!hit) return;
  for (let fold = hit.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  hit.scrollIntoView({ block: "center", behavior: "instant" });
}, 50));
