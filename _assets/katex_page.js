/* Typeset every formula of the page; see _ext/katex_math.py. */
document.addEventListener("DOMContentLoaded", () => {
  const macros = Object.assign({}, katexMacros);
  document.querySelectorAll(".math.inline, .math.block > .tex").forEach((element) => {
    const tex = element.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
    const displayMode = !element.classList.contains("inline");
    katex.render(tex, element, { displayMode, macros, throwOnError: false, strict: "ignore" });
  });
  fit();
  addEventListener("resize", fit);
  document.documentElement.dataset.math = "ready";
});

/* An equation that is wider than a phone is set smaller, to four fifths at most; what is wider still is pulled aside. */
function fit() {
  document.querySelectorAll(".math.block > .tex").forEach((box) => {
    box.style.fontSize = "";
    if (box.scrollWidth > box.clientWidth) {
      box.style.fontSize = `${Math.max(0.8, 0.98 * box.clientWidth / box.scrollWidth)}em`;
    }
  });
}
