/* Typeset every formula of the page; see _ext/katex_math.py. */
document.addEventListener("DOMContentLoaded", () => {
  const macros = Object.assign({}, katexMacros);
  document.querySelectorAll(".math.inline, .math.block > .tex").forEach((element) => {
    const tex = element.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
    const displayMode = !element.classList.contains("inline");
    katex.render(tex, element, { displayMode, macros, throwOnError: false, strict: "ignore" });
  });
  document.documentElement.dataset.math = "ready";
});
