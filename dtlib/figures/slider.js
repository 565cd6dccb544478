  const input = root.querySelector("input"), output = root.querySelector("output");
  const note = root.querySelector(".note"), probe = root.querySelector(".probe");
  const picture = root.querySelector("[role=img]");
  const curves = root.querySelectorAll("[role=img] .curve"), dots = root.querySelectorAll(".dot");
  const readings = root.querySelectorAll("li b");
  const scale = { linear: (v) => v, log: Math.log, log2: Math.log };
  const place = (axis, v) => {
    const s = scale[axis.scale], [low, high] = axis.limits.map(s);
    return axis.from + ((axis.to - axis.from) * (s(v) - low)) / (high - low);
  };
  const path = (xs, ys) => {
    let d = "", pen = "M";
    ys.forEach((y, i) => {
      if (y === null) { pen = "M"; return; }
      d += pen + place(data.x, xs[i]).toFixed(1) + " " + place(data.y, y).toFixed(1);
      pen = "L";
    });
    return d;
  };
  function show() {
    const step = data.steps[+input.value];
    output.textContent = step.text;
    input.setAttribute("aria-valuetext", step.spoken);
    picture.setAttribute("aria-label", step.alt);
    readings.forEach((b, i) => { b.textContent = step.readings[i]; });
    if (note) note.textContent = step.note;
    if (step.curves) curves.forEach((c, i) => c.setAttribute("d", path(data.xs, step.curves[i])));
    const at = place(data.x, step.probe);
    ["x1", "x2"].forEach((name) => probe.setAttribute(name, at.toFixed(1)));
    dots.forEach((dot, i) => {
      const y = step.at[i];
      dot.style.display = y === null ? "none" : "";
      if (y === null) return;
      dot.setAttribute("cx", at.toFixed(1));
      dot.setAttribute("cy", place(data.y, y).toFixed(1));
    });
  }
  input.disabled = false;
  input.addEventListener("input", show);
  root.querySelector("details").open = false;
  show();
