  const selects = [...root.querySelectorAll("select")], rows = [...root.querySelectorAll("tbody tr")];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  // As units.format_bytes writes it: a tie goes to the even digit, and no digit before the point is lost.
  const text = (bytes, digits) => {
    let k = 0;
    while (bytes >= 1024 && k < units.length - 1) { bytes /= 1024; k += 1; }
    const kept = Math.max(digits, String(Math.trunc(bytes)).length);
    const rules = { maximumSignificantDigits: kept, roundingMode: "halfEven", useGrouping: false };
    return bytes.toLocaleString("en", rules) + " " + units[k];
  };
  const part = ([shape, values], places) =>
    values[shape.reduce((at, size, axis) => at * size + (size === 1 ? 0 : places[axis]), 0)];
  function show() {
    const places = selects.map((each) => each.selectedIndex);
    const found = data.parts.map((each) => part(each, places));
    const total = found.reduce((a, b) => a + b, 0), most = Math.max(...found);
    found.forEach((bytes, i) => {
      rows[i].querySelector("td").textContent = text(bytes, 4);
      rows[i].querySelector("span").style.width = (100 * bytes) / most + "%";
    });
    root.querySelector("tfoot td").textContent = text(total, 4);
    const memory = data.limits[places[places.length - 1]], left = (1 - data.free) * memory - total;
    root.querySelector(".verdict").textContent =
      (left >= 0 ? "It fits: " : "It does not fit: ") + Math.round(100 * data.free) + "% of " + text(memory, 3) +
      " kept free, " + text(Math.abs(left), 3) + (left >= 0 ? " are left." : " are missing.");
  }
  selects.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
  show();
