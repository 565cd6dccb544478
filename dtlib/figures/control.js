(function () {
  const root = document.getElementById("@ID@");
  if (!root || root.dataset.ready) return;
  root.dataset.ready = "yes";
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
@SCRIPT@})();
