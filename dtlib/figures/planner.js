(function () {
  const root = document.getElementById("@ID@");
  if (!root || root.dataset.ready) return;
  root.dataset.ready = "yes";
  const answers = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const selects = [...root.querySelectorAll("select")];
  function show() {
    const place = selects.reduce((at, each) => at * each.options.length + each.selectedIndex, 0);
    root.querySelector(".answer").innerHTML = answers[place];
  }
  selects.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
})();
