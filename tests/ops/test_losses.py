"""Losses against eager, with their gradients: targets ignored, smoothed, weighted, reduced."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.support import TRAINED, Cases, check, in_both, values

in_inference, in_training = Cases(), Cases()

REDUCTIONS = ("mean", "sum", "none")


def targets(n, classes):
    return values(n, dtype=torch.int64, low=0, high=classes, seed=5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_matches_eager(reduction, smoothing):
    t = targets(17, 33)
    t[3] = t[11] = -100

    def loss(x, t):
        return F.cross_entropy(x, t, reduction=reduction, label_smoothing=smoothing)

    check(loss, values(17, 33), t, train=True)


@TRAINED
def test_one_row_with_an_ignored_target_matches_eager(train):
    def losses(x, w, ignored, none):
        kept = ignored >= 0
        row = w[0, :9]
        return (
            F.cross_entropy(x, ignored, reduction="sum"),
            F.cross_entropy(x @ w, ignored),
            F.cross_entropy(x.view(9), none, reduction="sum"),
            F.nll_loss(x[:, :, None], ignored[None], reduction="none"),
            torch.where(kept, w.index_select(0, torch.where(kept, ignored, 0))[:, 0], 2.0),
            torch.where(kept, row.gather(0, torch.where(kept, ignored, 0)), -1.0),
        )

    ignored = torch.tensor([-100])
    check(losses, values(1, 9), values(9, 12, seed=1), ignored, ignored[0].clone(), train=train)


@in_training.each((torch.bfloat16, torch.float64))
def cross_entropy_of_other_dtypes_matches_eager(dtype):
    return (lambda x, t: F.cross_entropy(x, t), values(17, 33, dtype=dtype), targets(17, 33))


@in_training
def cross_entropy_of_float_logits_from_half_matches_eager():
    return (
        lambda x, t: F.cross_entropy(x.float(), t),
        values(17, 129, dtype=torch.bfloat16),
        targets(17, 129),
    )


@in_training
def cross_entropy_with_class_weights_and_ignored_classes_matches_eager():
    def loss(x, t, w):
        w = w.detach()
        return (
            F.cross_entropy(x, t, w),
            F.cross_entropy(x, t, w, ignore_index=2),
            F.cross_entropy(x, t, w, reduction="sum", label_smoothing=0.2),
        )

    return loss, values(17, 9), targets(17, 9), values(9, seed=1).abs() + 0.1


@in_training
def cross_entropy_of_class_probabilities_matches_eager():
    return (
        lambda x, p: (
            F.cross_entropy(x, p.softmax(-1)),
            F.kl_div(x.log_softmax(-1), p.softmax(-1), reduction="batchmean"),
        ),
        values(7, 33),
        values(7, 33, seed=1),
    )


@in_training
def cross_entropy_over_pixels_matches_eager():
    t = values(2, 4, 3, dtype=torch.int64, low=0, high=5)
    return (
        lambda x, t: (F.cross_entropy(x, t), F.cross_entropy(x, t, reduction="none")),
        values(2, 5, 4, 3),
        t,
    )


@in_inference
def cross_entropy_with_every_target_ignored_is_nan_as_in_eager():
    return (lambda x, t: F.cross_entropy(x, t), values(5, 9), torch.full((5,), -100))


OF_CLASSES = (((5, 7), (5,)), ((7,), ()), ((2, 7, 3), (2, 3)))


@in_training.each(itertools.product(OF_CLASSES, REDUCTIONS))
def gradient_of_an_infinite_loss_is_that_of_eager(case):
    (shape, rows), reduction = case
    t = values(*rows, dtype=torch.int64, low=0, high=7, seed=5)
    if rows:
        t.view(-1)[1] = -100

    def loss(x, w, t):
        w = w.detach()
        plain = F.nll_loss(x, t, reduction=reduction)
        return plain * math.inf, F.cross_entropy(x, t, w, reduction=reduction) * math.inf

    return loss, values(*shape), values(7, seed=1).abs() + 0.1, t


@in_training
def language_model_loss_shifts_its_targets():
    def loss(logits, ids):
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        return F.cross_entropy(shifted, ids[:, 1:].reshape(-1)), logits.argmax(-1)

    return loss, values(2, 9, 33), targets(18, 33).view(2, 9)


LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.5, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, delta=0.7, **k),
    "bce_with_logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **k),
    "bce": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **k),
    "soft_margin": lambda x, y, **k: F.soft_margin_loss(x, y.sign().detach(), **k),
    "poisson": lambda x, y, **k: F.poisson_nll_loss(x, y.abs(), **k),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@in_both
def test_elementwise_losses_match_eager(reduction, check):
    def losses(x, y):
        return {name: loss(x, y, reduction=reduction) for name, loss in LOSSES.items()}

    check(losses, values(7, 33), values(7, 33, seed=1), train=True)


@in_training
def gradient_of_soft_margin_does_not_cancel_where_the_margin_is_wide():
    x = torch.tensor([14.0, -15.0, 16.25, 0.5])
    return (lambda x: F.soft_margin_loss(x, x.detach().sign(), reduction="sum"), x)


@in_training
def losses_over_pairs_match_eager():
    def losses(x, y, z):
        sign, a, b = torch.ones(9), x[:, 0], y[:, 0]
        return (
            F.cosine_similarity(x, y),
            F.cosine_embedding_loss(x, y, sign),
            F.triplet_margin_loss(x, y, z),
            F.pairwise_distance(x, y),
            F.margin_ranking_loss(a, b, sign),
            F.hinge_embedding_loss(a, sign),
        )

    return losses, *(values(9, 17, seed=s) for s in range(3))


@in_training
def nll_loss_matches_eager():
    def loss(x, t):
        return F.nll_loss(x.log_softmax(-1), t), F.nll_loss(x, t, reduction="none", ignore_index=3)

    return loss, values(17, 9), targets(17, 9)


@in_training
def label_smoothing_written_by_hand_matches_eager():
    def loss(x, t):
        log_p = x.log_softmax(-1)
        hot = torch.zeros_like(x).scatter(1, t[:, None], 1.0)
        soft = hot * 0.9 + 0.1 / x.shape[-1]
        picked = log_p.gather(1, t[:, None]).squeeze(1)
        return -(soft * log_p).sum(-1).mean(), -picked.mean(), (x.argmax(-1) == t).float().mean()

    return loss, values(17, 9), targets(17, 9)


@in_training
def z_loss_and_masked_mean_match_eager():
    def loss(x, mask):
        z = x.logsumexp(-1)
        weight = mask.to(x.dtype)
        return (z * z * weight).sum() / weight.sum().clamp(min=1)

    return loss, values(17, 33), values(17, dtype=torch.bool)


@TRAINED
def test_losses_take_dynamic_shapes(train):
    def losses(x, t, y):
        return F.cross_entropy(x, t), F.mse_loss(x, y), F.cross_entropy(x, t, ignore_index=2)

    check(losses, values(17, 9), targets(17, 9), values(17, 9, seed=1), dynamic=True, train=train)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
