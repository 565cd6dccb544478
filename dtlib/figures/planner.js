  const selects = [...root.querySelectorAll("select")];
  function show() {
    const place = selects.reduce((at, each) => at * each.options.length + each.selectedIndex, 0);
    const whole = [...data.answers[place]].map((letter) => data.marks[letter] ?? letter).join("");
    root.querySelector(".answer").innerHTML = whole;
  }
  selects.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
