  const selects = [...root.querySelectorAll("select")];
  function show() {
    const place = selects.reduce((at, each) => at * each.options.length + each.selectedIndex, 0);
    root.querySelector(".answer").innerHTML = data[place];
  }
  selects.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
