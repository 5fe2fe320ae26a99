#!lua name=outrider_ngrams_1
-- N-gram tiers inside Redis. Layout of keys and values: redis_store.py. Semantics: outrider.core.ngrams.NgramTiers.
-- The number at the end of the names is the version of layout and functions; servers of two versions can share a Redis.

local ENTRY = 8       -- bytes of a follower: token id and count, 4 bytes each
local TAIL = 't'      -- field of a tier's last tokens; n-grams have a multiple of 4 bytes, so no n-gram has this name
local REFUSED = '!'   -- prefix of the fields that list refused tokens

-- The last n tokens.
local function last(tokens, n)
  return tokens:sub(-4 * n)
end

-- Bytes without those entries, of `size` bytes each, that begin with one of `tokens`.
local function without(entries, size, tokens)
  local kept = {}
  for at = 1, #entries, size do
    local token = entries:sub(at, at + 3)
    local found = false
    for other = 1, #tokens, 4 do
      found = found or tokens:sub(other, other + 3) == token
    end
    if not found then
      kept[#kept + 1] = entries:sub(at, at + size - 1)
    end
  end
  return table.concat(kept)
end

-- Followers, the token counted once more. The most counted first, the latest first among equals.
local function count(followers, token, max_followers)
  local times = 1
  for at = 1, #followers, ENTRY do
    if followers:sub(at, at + 3) == token then
      times = struct.unpack('<I4', followers, at + 4) + 1
      followers = followers:sub(1, at - 1) .. followers:sub(at + ENTRY)
      break
    end
  end
  if times == 1 then
    followers = followers:sub(1, ENTRY * (max_followers - 1))
  end
  local at = 1
  while at < #followers and struct.unpack('<I4', followers, at + 4) > times do
    at = at + ENTRY
  end
  return followers:sub(1, at - 1) .. token .. struct.pack('<I4', times) .. followers:sub(at)
end

-- Counts the tokens of `stream` from byte `start` on as followers of the n-grams before them.
local function learn(key, stream, start, max_match_len, max_followers)
  local changed = {}
  for at = math.max(start, 5), #stream, 4 do
    local token = stream:sub(at, at + 3)
    for n = 1, math.min(max_match_len, (at - 1) / 4) do
      local ngram = stream:sub(at - 4 * n, at - 1)
      local followers = changed[ngram] or redis.call('HGET', key, ngram) or ''
      changed[ngram] = count(followers, token, max_followers)
    end
  end
  for ngram, followers in pairs(changed) do
    redis.call('HSET', key, ngram, followers)
  end
end

-- KEYS: dynamic, rejected. ARGV: max_match_len, max_followers, ttl in seconds, accepted tokens,
-- then context, rejected and continuation for each refused draft.
local function record(keys, args)
  local max_match_len, max_followers, ttl = tonumber(args[1]), tonumber(args[2]), tonumber(args[3])
  if #args[4] > 0 then
    local tail = redis.call('HGET', keys[1], TAIL) or ''
    local stream = tail .. args[4]
    learn(keys[1], stream, #tail + 1, max_match_len, max_followers)
    redis.call('HSET', keys[1], TAIL, last(stream, max_match_len))
  end
  for i = 5, #args, 3 do
    local context = last(args[i], max_match_len)
    learn(keys[2], context .. args[i + 2], #context + 1, max_match_len, max_followers)
    local token = args[i + 1]:sub(1, 4)
    local refused = redis.call('HGET', keys[2], REFUSED .. context) or ''
    refused = token .. without(refused, 4, token)
    redis.call('HSET', keys[2], REFUSED .. context, refused:sub(1, 4 * max_followers))
  end
  redis.call('EXPIRE', keys[1], ttl)
  redis.call('EXPIRE', keys[2], ttl)
  return redis.status_reply('OK')
end

-- KEYS: a prior tier. ARGV: max_match_len, max_followers, ttl in seconds,
-- then the tokens before, and the tokens, of each piece.
local function load(keys, args)
  for i = 4, #args, 2 do
    learn(keys[1], args[i] .. args[i + 1], #args[i] + 1, tonumber(args[1]), tonumber(args[2]))
  end
  redis.call('EXPIRE', keys[1], tonumber(args[3]))
  return redis.status_reply('OK')
end

-- The followers of the longest suffix, of at least min_len tokens, that the tier knows.
local function followers_of(key, tokens, min_len)
  for n = #tokens / 4, min_len, -1 do
    local followers = redis.call('HGET', key, last(tokens, n))
    if followers then
      return followers
    end
  end
  return ''
end

-- Follows the most counted tokens within one tier. Returns nodes of 12 bytes: parent offset, token id, count.
local function walk(key, ngram, followers, max_match_len, max_len, fanout)
  local match_len, tail = #ngram / 4, ngram
  local nodes, parents, alternatives = {}, {}, {}
  while #followers > 0 and #nodes < max_len do
    for at = ENTRY + 1, math.min(#followers, ENTRY * (fanout[#nodes + 1] or 1)), ENTRY do
      parents[#parents + 1] = #nodes
      alternatives[#parents] = followers:sub(at, at + ENTRY - 1)
    end
    local best = followers:sub(1, ENTRY)
    nodes[#nodes + 1] = struct.pack('<I4', math.min(#nodes, 1)) .. best
    tail = last(tail .. best:sub(1, 4), max_match_len)
    followers = followers_of(key, tail, match_len)
  end
  for i = 1, #parents do
    local offset = parents[i] > 0 and #nodes + 1 - parents[i] or 0
    nodes[#nodes + 1] = struct.pack('<I4', offset) .. alternatives[i]
  end
  return table.concat(nodes)
end

-- One context. Returns match length, index of the tier from 1, then the nodes; '' = nothing found.
local function lookup_one(keys, context, max_match_len, max_len, fanout)
  local tail = last(context, max_match_len)
  local refused = keys[3] and redis.call('HGET', keys[3], REFUSED .. tail) or ''
  for n = #tail / 4, 1, -1 do
    local ngram = last(tail, n)
    for tier = 1, #keys do
      local followers = redis.call('HGET', keys[tier], ngram) or ''
      if tier == 1 and #refused > 0 then
        followers = without(followers, ENTRY, refused)
      end
      if #followers > 0 then
        return struct.pack('<I4I4', n, tier) .. walk(keys[tier], ngram, followers, max_match_len, max_len, fanout)
      end
    end
  end
  return ''
end

-- KEYS: prior; with a session also dynamic, rejected. ARGV: max_match_len, max_continuation_len, fanout at the first
-- and at the second position, then one context in each.
local function lookup(keys, args)
  local found = {}
  local fanout = {tonumber(args[3]), tonumber(args[4])}
  for i = 5, #args do
    found[i - 4] = lookup_one(keys, args[i], tonumber(args[1]), tonumber(args[2]), fanout)
  end
  return found
end

redis.register_function('outrider_record_1', record)
redis.register_function('outrider_load_1', load)
redis.register_function{function_name = 'outrider_lookup_1', callback = lookup, flags = {'no-writes'}}
